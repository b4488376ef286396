"""CUDA graphs of rounds: one launch for all of draft, verify, draw and accept; or for one forward of a round in which
the host has a part.

Knows buckets, the buffers that graphs read, and replays. Does not know what a part does. Rows are padded to a power of
two with the slot that is nobody's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distspec.copies import put
from distspec.engine.graphs import is_out_of_memory
from distspec.engine.rolling.round import Part, Round
from distspec.engine.rolling.state import Kind, State

log = logging.getLogger(__name__)

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
class _Captured:
    """fed: int64 [rows, part.fed], which the graph reads; result: what it leaves, until another graph runs."""

    graph: torch.cuda.CUDAGraph
    fed: Tensor
    result: Tensor


class RoundGraphs:
    """Graphs of rounds, captured when first wanted or before."""

    def __init__(self, compute: Round, state: State) -> None:
        self._round = compute
        self._state = state
        self._spare = len(state.lengths) - 1
        self._slots = torch.full((_padded(self._spare),), self._spare, dtype=torch.int64, device=state.device)
        self._there: list[int] = []
        self._graphs: dict[Bucket, _Captured | None] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(state.device)  # type: ignore[no-untyped-call]

    def run(self, part: Part, slots: Sequence[int], kind: Kind, fed: Tensor | None) -> Tensor | None:
        """What Round.compute returns, which the next graph of rounds overwrites; None if memory is too short for its
        graph."""
        bucket = Bucket(part, _padded(len(slots)), kind.truncates and part.draws)
        captured = self.captured(bucket)
        if captured is None:
            return None
        padded = [*slots, *[self._spare] * (bucket.rows - len(slots))]
        if padded != self._there[: bucket.rows]:
            put(padded, self._slots[: bucket.rows])
            self._there[: bucket.rows] = padded
        if fed is not None:
            captured.fed[: len(slots)].copy_(fed)
        captured.graph.replay()
        return captured.result[: len(captured.result) // bucket.rows * len(slots)]

    def captured(self, bucket: Bucket) -> _Captured | None:
        """The graph of a bucket; None if memory is too short."""
        if bucket not in self._graphs:
            try:
                self._graphs[bucket] = self._capture(bucket)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                self._graphs[bucket] = None
                torch.cuda.empty_cache()
                log.warning(
                    "out of memory while capturing rounds of %d rows and %d drafts: such rounds are launched kernel by "
                    "kernel; lower engine.gpu_memory_utilization",
                    bucket.rows,
                    bucket.part.steps,
                )
        return self._graphs[bucket]

    def _capture(self, bucket: Bucket) -> _Captured:
        """A round of nobody's is computed, and then captured: what the buffers hold decides nothing of what is
        launched."""
        part, slots, kind = bucket.part, self._slots[: bucket.rows], _TRUNCATED if bucket.truncates else _WHOLE
        fed = torch.zeros(bucket.rows, part.fed, dtype=torch.int64, device=slots.device)
        slots.fill_(self._spare)
        self._there[: bucket.rows] = [self._spare] * bucket.rows
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._round.compute(part, slots, kind, fed)  # kernels are compiled, workspaces allocated
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, as links of other workers do.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = self._round.compute(part, slots, kind, fed)
        return _Captured(graph, fed, result)


def _padded(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
