"""CUDA graphs of rounds: one launch for all of draft, verify, draw and accept; or for one forward of a round in which
the host has a part.

Knows buckets, and the buffers that graphs read. Does not know what a part does. Rows are padded to a power of
two with the slot that is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from distspec.copies import put
from distspec.engine.capture import Capture, Captured, captured
from distspec.engine.rolling.round import Part, Round
from distspec.engine.rolling.state import Kind, State

_WHOLE = Kind((), 0, False, False)
_TRUNCATED = Kind((), 1, True, True)
"""On a GPU greedy rows and others go together (kernels/sample.py), and limits that are off cost time, no tokens."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Launches that share a graph. rows: padded; truncates: some row may have top_k, top_p or min_p."""

    part: Part
    rows: int
    truncates: bool


@dataclass(frozen=True, slots=True)
class _Graph:
    """fed: int64 [rows, part.fed], which it reads."""

    fed: Tensor
    captured: Captured[Tensor]


class RoundGraphs:
    """Graphs of rounds, captured when first wanted or before."""

    def __init__(self, compute: Round, state: State, capture: Capture) -> None:
        self._round = compute
        self._capture = capture
        self._spare = len(state.lengths) - 1
        self._slots = torch.full((_padded(self._spare),), self._spare, dtype=torch.int64, device=state.device)
        self._there: list[int] = []
        self._graphs: dict[Bucket, _Graph | None] = {}

    def prepare(self, parts: Iterable[Part], only_largest: bool = False) -> None:
        """Capture these now, of any number of rows, largest first, so that the others reuse its memory. only_largest:
        those of most rows."""
        parts, most = list(parts), len(self._slots)
        for rows in [most >> i for i in range(1 if only_largest else most.bit_length())]:
            for part in parts:
                for truncates in (True, False) if part.draws else (False,):
                    self._graph(Bucket(part, rows, truncates))

    def run(self, part: Part, slots: Sequence[int], kind: Kind, fed: Tensor | None) -> Tensor | None:
        """What Round.compute returns, which the next graph of rounds overwrites; None if memory is too short for its
        graph."""
        bucket = Bucket(part, _padded(len(slots)), kind.truncates and part.draws)
        graph = self._graph(bucket)
        if graph is None:
            return None
        padded = [*slots, *[self._spare] * (bucket.rows - len(slots))]
        if padded != self._there[: bucket.rows]:
            put(padded, self._slots[: bucket.rows])
            self._there[: bucket.rows] = padded
        if fed is not None:
            graph.fed[: len(slots)].copy_(fed)
        graph.captured.replay()
        result = graph.captured.result
        return result[: len(result) // bucket.rows * len(slots)]

    def _graph(self, bucket: Bucket) -> _Graph | None:
        """Of a round of nobody's: what the buffers hold decides nothing of what is launched."""
        if bucket not in self._graphs:
            part, slots, kind = bucket.part, self._slots[: bucket.rows], _TRUNCATED if bucket.truncates else _WHOLE
            fed = torch.zeros(bucket.rows, part.fed, dtype=torch.int64, device=slots.device)
            slots.fill_(self._spare)
            self._there[: bucket.rows] = [self._spare] * bucket.rows
            what = f"rounds of {bucket.rows} rows and {part.steps} drafts"
            found = captured(self._capture, partial(self._round.compute, part, slots, kind, fed), what)
            self._graphs[bucket] = _Graph(fed, found) if found is not None else None
        return self._graphs[bucket]


def _padded(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
