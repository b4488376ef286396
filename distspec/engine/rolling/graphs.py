"""CUDA graphs of whole rounds: one launch for all of draft, verify, draw and accept.

Knows buckets, the buffer of slots that a round reads, and replays. Does not know what a round does. Rows are padded to
a power of two with the slot that is nobody's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distspec.engine.graphs import is_out_of_memory
from distspec.engine.rolling.state import Kind, State

log = logging.getLogger(__name__)

_WHOLE = Kind((), 0, False, False)
_TRUNCATED = Kind((), 1, True, True)
"""On a GPU greedy rows and others go together (kernels/sample.py), and limits that are off cost time, no tokens."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rounds that share a graph. rows: padded; truncates: some row may have top_k, top_p or min_p."""

    rows: int
    steps: int
    truncates: bool


class RoundGraphs:
    """Graphs of rounds, captured when first wanted or before; see Round for `compute`."""

    def __init__(self, compute: Callable[[Tensor, int, Kind], Tensor], state: State) -> None:
        self._compute = compute
        self._state = state
        self._spare = len(state.lengths) - 1
        self._slots = torch.full((_padded(self._spare),), self._spare, dtype=torch.int64, device=state.device)
        self._there: list[int] = []
        self._graphs: dict[Bucket, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(state.device)  # type: ignore[no-untyped-call]

    def run(self, slots: Sequence[int], steps: int, kind: Kind) -> Tensor | None:
        """Results of a round, int64 [slots, steps + 2], which the next one overwrites; None if memory is too short for
        its graph."""
        bucket = Bucket(_padded(len(slots)), steps, kind.truncates)
        captured = self.captured(bucket)
        if captured is None:
            return None
        padded = [*slots, *[self._spare] * (bucket.rows - len(slots))]
        if padded != self._there[: bucket.rows]:
            self._slots[: bucket.rows].copy_(self._state.upload(padded), non_blocking=True)
            self._there[: bucket.rows] = padded
        graph, results = captured
        graph.replay()
        return results[: len(slots)]

    def captured(self, bucket: Bucket) -> tuple[torch.cuda.CUDAGraph, Tensor] | None:
        """A graph and where its results lie; None if memory is too short."""
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
                    bucket.steps,
                )
        return self._graphs[bucket]

    def _capture(self, bucket: Bucket) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A round of nobody's is computed, and then captured: what the buffer holds decides nothing of what is
        launched."""
        slots, kind = self._slots[: bucket.rows], _TRUNCATED if bucket.truncates else _WHOLE
        slots.fill_(self._spare)
        self._there[: bucket.rows] = [self._spare] * bucket.rows
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._compute(slots, bucket.steps, kind)  # kernels are compiled, workspaces allocated
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, as links of other workers do.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            results = self._compute(slots, bucket.steps, kind)
        return graph, results


def _padded(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
