"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from distspec.errors import InvalidValue


def _file(option: str, *suffixes: str) -> Callable[[Path | None], Path | None]:
    """A check of an option that names a file to write, before the work whose result it takes. suffixes: of any one."""

    def check(path: Path | None) -> Path | None:
        if path is None:
            return None
        if suffixes and path.suffix not in suffixes:
            raise InvalidValue(option, str(path), f"a file that ends in {' or '.join(suffixes)}")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InvalidValue(option, str(path), "a file that can be written, in a folder that is there")
        return path

    return check


def _files(option: str, *suffixes: str) -> Callable[[list[Path]], list[Path]]:
    """The same for each of several."""
    check = _file(option, *suffixes)
    return lambda paths: [path for path in paths if check(path)]


ConfigName = Annotated[str, typer.Option("--config", help="A shipped configuration (local, colocated) or a file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides, as pools.verify.replicas=2; `distspec check local` prints all keys.",
        show_default=False,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="A running Ray cluster (auto: this machine's). Without it and without RAY_ADDRESS, one is started.",
        show_default=False,
    ),
]
Json = Annotated[
    Path | None, typer.Option("--json", callback=_file("json"), help="File to write the rows to, as a JSON list.")
]
Png = Annotated[Path | None, typer.Option(callback=_file("png", ".png"), help="File to draw the figures to.")]
Pictures = Annotated[
    list[Path],
    typer.Option(
        callback=_files("out", ".png", ".json"),
        help="A .png to draw one request in, or a .json for ui.perfetto.dev; may be given twice.",
    ),
]
