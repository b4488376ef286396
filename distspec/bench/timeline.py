"""A request's life as a picture: a lane for each worker, a bar for each piece of work, what was wasted hatched.

Knows spans. Does not know where they come from. Imports matplotlib; whoever needs no picture does not import this.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from distspec.trace import Span, lanes

# Colours that colour-blind readers tell apart (Okabe and Ito, 2008).
COLOURS = {
    "queue": "#bbbbbb",
    "prefill": "#009e73",
    "decode": "#56b4e9",
    "verify": "#0072b2",
    "draft": "#e69f00",
    "round": "#d55e00",
    "transfer": "#cc79a7",
}
WASTED, HATCH, HATCHES = "#eeeeee", "//////", "#999999"
TRACKS = ("coordinator", "prefill", "decode", "verify", "draft")

WIDTH_PX, DPI = 1600, 100
BAR_PX, LABEL_PX = 24, 34
MOST_STRETCHES = 8

Bar = tuple[Span, int]
"""A span and its row, counted from the top."""


def draw(spans: Sequence[Span], path: str | Path) -> None:
    """Write a PNG, 1600 pixels wide, of the spans of one request (at least one); time in ms from the first of them.

    The kept share of a bar is solid, the rest hatched. A long life is cut into stretches, one below the other, so
    that a usual bar stays wide enough to be seen.
    """
    begin_s = min(span.start_s for span in spans)
    total_ms = max(1e3 * (max(span.end_s for span in spans) - begin_s), 1e-3)
    commits = [span for span in spans if span.name == "commit"]
    rows, bars = _rows([span for span in spans if span.name != "commit"])
    stretches = _stretches([span for span, _ in bars], total_ms)
    height = stretches * (0.27 * len(rows) + 0.45) + 1.1
    figure = Figure(figsize=(WIDTH_PX / DPI, height), dpi=DPI, layout="constrained")
    for i, axes in enumerate(figure.subplots(stretches, squeeze=False)[:, 0]):
        left, right = total_ms * i / stretches, total_ms * (i + 1) / stretches
        _stretch(axes, [bar for bar in bars if _meets(bar[0], begin_s, left, right)], begin_s, right - left)
        ticks = [1e3 * (span.end_s - begin_s) for span in commits]
        axes.plot(ticks, [0] * len(ticks), "|", color="black", markersize=11, clip_on=True)
        axes.set_xlim(left, right)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), rows)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color="#eeeeee")
        axes.set_axisbelow(True)
    axes.set_xlabel("ms since the request arrived")
    figure.suptitle(_title(spans, total_ms), fontsize=11)
    figure.legend(handles=_legend({span.name for span in spans}), loc="outside lower center", ncols=9, frameon=False)
    figure.savefig(path, format="png")


def _rows(spans: Iterable[Span]) -> tuple[list[str], list[Bar]]:
    """Labels of the rows, coordinator first, and each span's row. Work that overlaps on a worker takes several."""
    placed = lanes(spans)
    rows = sorted({(span.track, lane) for span, lane in placed} | {("coordinator", 0)}, key=lambda row: _order(*row))
    at = {row: i for i, row in enumerate(rows)}
    labels = [track if lane == 0 else "" for track, lane in rows]
    return labels, [(span, at[span.track, lane]) for span, lane in placed]


def _order(track: str, lane: int) -> tuple[int, str, int, int]:
    role, _, index = track.partition(":")
    rank = TRACKS.index(role) if role in TRACKS else len(TRACKS)
    return rank, role, int(index) if re.fullmatch(r"\d+", index) else 0, lane


def _stretches(spans: Sequence[Span], total_ms: float) -> int:
    """In how many pieces the time is cut, for a usual bar to be BAR_PX wide."""
    lengths = [1e3 * (span.end_s - span.start_s) for span in spans if span.name in COLOURS and span.name != "queue"]
    if not any(lengths):
        return 1
    usual_ms = sum(length * length for length in lengths) / sum(lengths)  # of what is busy at a random moment
    return min(MOST_STRETCHES, math.ceil(total_ms / WIDTH_PX * BAR_PX / usual_ms))


def _meets(span: Span, begin_s: float, left_ms: float, right_ms: float) -> bool:
    return 1e3 * (span.end_s - begin_s) >= left_ms and 1e3 * (span.start_s - begin_s) <= right_ms


def _stretch(axes: Axes, bars: Iterable[Bar], begin_s: float, length_ms: float) -> None:
    """The bars, each with what was kept of it as "kept/brought" where it is wide enough."""
    for span, row in bars:
        start_ms, end_ms = 1e3 * (span.start_s - begin_s), 1e3 * (span.end_s - begin_s)
        middle_ms = start_ms + span.use * (end_ms - start_ms)
        colour = COLOURS.get(span.name, "#999999")
        if span.use < 1:
            rest = [(middle_ms, end_ms - middle_ms)]
            axes.broken_barh(rest, (row - 0.4, 0.8), facecolor=WASTED, edgecolor=HATCHES, hatch=HATCH, linewidth=0.7)
        if span.use > 0:
            axes.broken_barh([(start_ms, middle_ms - start_ms)], (row - 0.4, 0.8), color=colour, linewidth=0.7)
        if span.brought is not None and (end_ms - start_ms) / length_ms * WIDTH_PX > LABEL_PX:
            box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.8}
            text = f"{span.kept}/{span.brought}"
            axes.text((start_ms + end_ms) / 2, row, text, ha="center", va="center", size=7, bbox=box, clip_on=True)


def _title(spans: Sequence[Span], total_ms: float) -> str:
    tokens = sum(int(span.args.get("tokens", 0)) for span in spans if span.name == "commit")
    return f"request {spans[0].request}: {tokens} tokens in {total_ms:.1f} ms; kept of brought: " + ", ".join(
        f"{name} {kept}/{brought}" for name, kept, brought in _sums(spans)
    )


def _sums(spans: Sequence[Span]) -> Iterator[tuple[str, int, int]]:
    """(kind, kept, brought) of each kind of work that brings tokens."""
    for name in COLOURS:
        bring = [span for span in spans if span.name == name and span.brought is not None]
        if bring:
            yield name, sum(span.kept for span in bring), sum(span.brought or 0 for span in bring)


def _legend(names: set[str]) -> list[Patch | Line2D]:
    kinds: list[Patch | Line2D] = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in names]
    wasted = Patch(facecolor=WASTED, edgecolor=HATCHES, hatch=HATCH, label="wasted")
    commit = Line2D([], [], marker="|", color="black", linestyle="", markersize=11, label="tokens sent to the client")
    return [*kinds, wasted, commit]
