"""Metrics as Prometheus text (exposition format 0.0.4). Knows families of samples; does not know whose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from distspec.metrics import Family, Sample


def exposition(families: Iterable[Family]) -> str:
    """One family after the other; families of one name (from several processes) share one header."""
    by_name: dict[str, list[Family]] = {}
    for family in families:
        by_name.setdefault(family.name, []).append(family)
    lines = []
    for name, same in by_name.items():
        lines.append(f"# HELP {name} {_escape(same[0].help, quotes=False)}")
        lines.append(f"# TYPE {name} {same[0].kind}")
        for family in same:
            for sample in family.samples:
                lines += _histogram(family, sample) if family.bounds else [_line(name, sample.labels, sample.value)]
    return "".join(f"{line}\n" for line in lines)


def _histogram(family: Family, sample: Sample) -> list[str]:
    totals = list(accumulate(sample.counts))
    edges = [*map(repr, family.bounds), "+Inf"]
    buckets = [
        _line(f"{family.name}_bucket", {**sample.labels, "le": edge}, total)
        for edge, total in zip(edges, totals, strict=True)
    ]
    return [
        *buckets,
        _line(f"{family.name}_sum", sample.labels, sample.value),
        _line(f"{family.name}_count", sample.labels, totals[-1]),
    ]


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    spelled = ",".join(f'{key}="{_escape(text, quotes=True)}"' for key, text in labels.items())
    return f"{name}{{{spelled}}} {value!r}" if spelled else f"{name} {value!r}"


def _escape(text: str, *, quotes: bool) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text
