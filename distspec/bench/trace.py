"""What a GPU did and when the host asked for it, from torch's profiler.

Knows intervals of kernels and copies, and launches of CUDA graphs. Does not know what was computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_GRAPH_LAUNCH = "cudaGraphLaunch"

Interval = tuple[int, int]
"""From, to: nanoseconds of the profiler's clock."""


@dataclass(slots=True)
class _Replay:
    """One launch of a graph. asked_ns: when the host called; busy: what the device did for it."""

    asked_ns: int
    busy: list[Interval] = field(default_factory=list)

    @property
    def begin(self) -> int:
        return min(start for start, _ in self.busy)

    @property
    def end(self) -> int:
        return max(end for _, end in self.busy)


class Trace:
    """A context in which the device is watched; ask it afterwards."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._replays: list[_Replay] = []
        self._busy: list[Interval] = []

    def __enter__(self) -> Trace:
        torch.cuda.synchronize()
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.cuda.synchronize()
        self._profile.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if kind is None:
            self._digest(self._profile.profiler.kineto_results.events())  # type: ignore[union-attr]

    def launched_ahead(self) -> list[bool]:
        """Of each launch of a graph but the first: whether the host asked for it before the one before had ended."""
        pairs = zip(self._replays, self._replays[1:], strict=False)
        return [later.asked_ns < earlier.end for earlier, later in pairs]

    def idle(self) -> float:
        """Share of the time, from the first launch's begin to the last one's end, in which the device did nothing.
        Watching lengthens the pause between two kernels; one that started early and waits for its turn is no pause."""
        return 1 - self._inside(self._busy) / (self._replays[-1].end - self._replays[0].begin)

    def idle_between(self) -> float:
        """As `idle`, of what lies between the launches' own begins and ends alone: what a host can be blamed for."""
        own = [(replay.begin, replay.end) for replay in self._replays]
        return 1 - self._inside(own + self._busy) / (self._replays[-1].end - self._replays[0].begin)

    def busy_s(self) -> float:
        """Seconds of a launch in which the device did something."""
        return self._inside(self._busy) / len(self._replays) * 1e-9

    def _inside(self, intervals: Iterable[Interval]) -> int:
        """How much of the time from the first launch's begin to the last one's end they cover."""
        begin, end = self._replays[0].begin, self._replays[-1].end
        return sum(max(0, min(last, end) - max(first, begin)) for first, last in _merged(intervals))

    def _digest(self, events: Iterable[Any]) -> None:
        replays: dict[int, _Replay] = {}
        device: list[tuple[int, Interval]] = []
        for event in events:
            span = (event.start_ns(), event.start_ns() + event.duration_ns())
            if event.device_type().name == "CUDA":
                device.append((event.correlation_id(), span))
            elif event.name() == _GRAPH_LAUNCH:
                replays[event.correlation_id()] = _Replay(span[0])
        for correlation, span in device:
            self._busy.append(span)
            if correlation in replays:
                replays[correlation].busy.append(span)
        self._replays = sorted((r for r in replays.values() if r.busy), key=lambda replay: replay.begin)


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out
