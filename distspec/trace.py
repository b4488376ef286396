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

    request: the coordinator's number of the request it served, or None.
    """

    name: str
    start_s: float
    end_s: float
    track: str
    request: int | None = None
    args: dict[str, int | float | str] = {}


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


def chrome(spans: Iterable[Span]) -> dict[str, Any]:
    """The trace as Chrome's JSON object format: one named thread per track, times in microseconds.

    Spans of one track that overlap are put on further threads of that track, since the format wants the
    spans of a thread nested.
    """
    events: list[dict[str, Any]] = []
    lanes: dict[str, list[float]] = {}
    threads: dict[tuple[str, int], int] = {}
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        ends = lanes.setdefault(span.track, [])
        lane = next((i for i, end in enumerate(ends) if end <= span.start_s), len(ends))
        ends[lane : lane + 1] = [span.end_s]
        thread = threads.setdefault((span.track, lane), len(threads) + 1)
        args = dict(span.args) if span.request is None else {"request": span.request, **span.args}
        events.append(
            {
                "name": span.name,
                "ph": "X",
                "pid": 1,
                "tid": thread,
                "ts": span.start_s * 1e6,
                "dur": max(span.end_s - span.start_s, 0.0) * 1e6,
                "args": args,
            }
        )
    for (track, lane), thread in threads.items():
        name = track if lane == 0 else f"{track} ({lane + 1})"
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(spans: Iterable[Span], path: str | Path) -> None:
    """Write a file that https://ui.perfetto.dev and chrome://tracing open."""
    Path(path).write_text(json.dumps(chrome(spans)))
