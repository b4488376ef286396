"""What a measurement leaves behind: rows, as a table on screen and as JSON.

Knows this machine and the versions on it. Does not know what was measured.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

import msgspec
from rich.console import Console
from rich.table import Table

_WIDE = 160
"""Columns of a table that goes to a file or a pipe."""

Context = dict[str, str | int | float]


class Row(msgspec.Struct, frozen=True):
    """One figure. reference: the peer's, or the bound, of the same run. ratio: value / reference, or of runs in turn
    the median of their ratios.

    context: machine, versions and sizes.
    """

    name: str
    value: float
    unit: str
    reference: float
    ratio: float
    context: Context


def row(name: str, value: float, unit: str, reference: float, context: Context) -> Row:
    return Row(name, value, unit, reference, value / reference, context)


def machine(*packages: str) -> Context:
    """Processor, cores that this process may use, and versions: of Python, distspec and `packages`."""
    versions = {package: metadata.version(package) for package in ("distspec", *packages)}
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        **versions,
    }


def report(rows: Sequence[Row], file: Path | None, also: Mapping[str, str] = MappingProxyType({})) -> None:
    """Print the rows and, if asked, write them to a file. also: further columns, numbers of contexts, by heading."""
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")
    table = Table()
    table.add_column("name", no_wrap=True)
    for head in ("value", "reference", "ratio"):
        table.add_column(head, justify="right")
    table.add_column("unit")
    for head in also:
        table.add_column(head, justify="right")
    for one in rows:
        further = [f"{one.context[key]:.3g}" for key in also.values()]
        table.add_row(one.name, f"{one.value:.4g}", f"{one.reference:.4g}", f"{one.ratio:.2f}", one.unit, *further)
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)


def _processor() -> str:
    """The processor's name: `platform.processor` is empty or only the architecture on most Linux systems."""
    listing = Path("/proc/cpuinfo")
    if listing.is_file():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
