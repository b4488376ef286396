"""Spans of time and what happened in them, kept in a bounded buffer and written as a Chrome/Perfetto trace.

Knows names, times and tracks. Does not know where spans come from, and reads no clock.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct


class Span(Struct, frozen=True):
    """Something that took time. start_s, end_s: wall clock, seconds. track: the worker it ran on.

    request: the coordinator's number of the request it served, or None. task: the number of the future that it
    answered. brought: tokens that it found (nodes of a draft, outcomes of a verdict), None for work that finds none;
    kept: how many of them the stream used.
    """

    name: str
    start_s: float
    end_s: float
    track: str
    request: int | None = None
    args: dict[str, int | float | str] = {}
    task: int | None = None
    brought: int | None = None
    kept: int = 0

    @property
    def use(self) -> float:
        """The share of its tokens that was kept, 0 to 1; 1 for work that was to bring none."""
        if self.brought is None:
            return 1.0
        return self.kept / self.brought if self.brought else 0.0


class Trace:
    """The last `limit` spans."""

    def __init__(self, limit: int = 100_000) -> None:
        self._spans: deque[Span] = deque(maxlen=limit)
        self.dropped = 0

    def add(self, span: Span) -> None:
        self.dropped += len(self._spans) == self._spans.maxlen
        self._spans.append(span)

    def spans(self) -> list[Span]:
        return list(self._spans)


def newest(spans: Iterable[Span]) -> int | None:
    """The request that began last, of those that have spans."""
    return max((span.request for span in spans if span.request is not None), default=None)


def lanes(spans: Iterable[Span]) -> list[tuple[Span, int]]:
    """Spans by time, each with a lane of its track, from 0, in which none overlaps another."""
    ends: dict[str, list[float]] = {}
    placed = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        taken = ends.setdefault(span.track, [])
        lane = next((i for i, end in enumerate(taken) if end <= span.start_s), len(taken))
        taken[lane : lane + 1] = [span.end_s]
        placed.append((span, lane))
    return placed


def chrome(spans: Iterable[Span]) -> dict[str, Any]:
    """The trace as Chrome's JSON object format: one named thread per track, times in microseconds.

    Spans of one track that overlap are put on further threads of that track, since the format wants the
    spans of a thread nested. The name says what was wasted, since Perfetto colours by name; chrome://tracing goes by
    the `cname`.
    """
    events: list[dict[str, Any]] = []
    threads: dict[tuple[str, int], int] = {}
    for span, lane in lanes(spans):
        thread = threads.setdefault((span.track, lane), len(threads) + 1)
        title, colour = _look(span)
        events.append(
            {
                "name": title,
                "cname": colour,
                "ph": "X",
                "pid": 1,
                "tid": thread,
                "ts": span.start_s * 1e6,
                "dur": max(span.end_s - span.start_s, 0.0) * 1e6,
                "args": _args(span),
            }
        )
    for (track, lane), thread in threads.items():
        name = track if lane == 0 else f"{track} ({lane + 1})"
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(spans: Iterable[Span], path: str | Path) -> None:
    """Write a file that https://ui.perfetto.dev and chrome://tracing open."""
    Path(path).write_text(json.dumps(chrome(spans)))


def _look(span: Span) -> tuple[str, str]:
    """Title and colour of a span, by what was kept of it."""
    if span.use >= 1:
        return span.name, "good"
    return (f"{span.name} (partly kept)", "bad") if span.use else (f"{span.name} (wasted)", "grey")


def _args(span: Span) -> dict[str, int | float | str]:
    """All that a span tells, without what it does not have."""
    known = {"request": span.request, "task": span.task, "brought": span.brought}
    args = {name: value for name, value in known.items() if value is not None}
    return {**args, **({} if span.brought is None else {"kept": span.kept}), **span.args}
