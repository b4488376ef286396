"""CUDA graphs of rounds: one launch for all of draft, verify, draw and accept; or one for the drafts and one for the
forward, where the host has a part in what follows.

Knows buckets, the buffer of slots that a round reads, and replays. Does not know what a stage does. Rows are padded to
a power of two with the slot that is nobody's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distspec.engine.graphs import is_out_of_memory
from distspec.engine.rolling.round import Round
from distspec.engine.rolling.state import Kind, State

log = logging.getLogger(__name__)

_WHOLE = Kind((), 0, False, False)
_TRUNCATED = Kind((), 1, True, True)
"""On a GPU greedy rows and others go together (kernels/sample.py), and limits that are off cost time, no tokens."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rounds that share graphs. rows: padded; truncates: some row may have top_k, top_p or min_p; staged: only draft
    and forward, each in a graph."""

    rows: int
    steps: int
    truncates: bool
    staged: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """A graph, and where its result lies, which any other graph of rounds may overwrite."""

    graph: torch.cuda.CUDAGraph
    result: Tensor

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.result


class RoundGraphs:
    """Graphs of rounds, captured when first wanted or before."""

    def __init__(self, compute: Round, state: State) -> None:
        self._round = compute
        self._state = state
        self._spare = len(state.lengths) - 1
        self._slots = torch.full((_padded(self._spare),), self._spare, dtype=torch.int64, device=state.device)
        self._there: list[int] = []
        self._graphs: dict[Bucket, list[Stage] | None] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(state.device)  # type: ignore[no-untyped-call]

    def run(self, slots: Sequence[int], steps: int, kind: Kind) -> Tensor | None:
        """Results of a round, int64 [slots, steps + 2], see Stage; None if memory is too short for its graph."""
        stages = self._ready(slots, Bucket(_padded(len(slots)), steps, kind.truncates))
        return stages[0]()[: len(slots)] if stages is not None else None

    def staged(self, slots: Sequence[int], steps: int, kind: Kind) -> list[Stage] | None:
        """Those of Round.draft and Round.forward, to be called in this order before any other graph of rounds; their
        results may have more rows. None if memory is too short."""
        # Without drafts nothing is drawn before the host's part.
        return self._ready(slots, Bucket(_padded(len(slots)), steps, kind.truncates and steps > 0, staged=True))

    def _ready(self, slots: Sequence[int], bucket: Bucket) -> list[Stage] | None:
        """The graphs of a bucket, for these slots."""
        stages = self.captured(bucket)
        padded = [*slots, *[self._spare] * (bucket.rows - len(slots))]
        if stages is not None and padded != self._there[: bucket.rows]:
            self._slots[: bucket.rows].copy_(self._state.upload(padded), non_blocking=True)
            self._there[: bucket.rows] = padded
        return stages

    def captured(self, bucket: Bucket) -> list[Stage] | None:
        """The graphs of a bucket; None if memory is too short."""
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

    def _capture(self, bucket: Bucket) -> list[Stage]:
        """A round of nobody's is computed, and then captured: what the buffer holds decides nothing of what is
        launched."""
        slots, computed = self._slots[: bucket.rows], self._computed(bucket)
        slots.fill_(self._spare)
        self._there[: bucket.rows] = [self._spare] * bucket.rows
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            value = slots
            for compute in computed:
                value = compute(value)  # kernels are compiled, workspaces allocated
        self._stream.synchronize()
        stages, value = list[Stage](), slots
        for compute in computed:
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile, as links of other workers do.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                value = compute(value)
            stages.append(Stage(graph, value))
        return stages

    def _computed(self, bucket: Bucket) -> list[Callable[[Tensor], Tensor]]:
        """What the graphs of a bucket hold: the first is given the slots, the next what the one before has made."""
        slots, kind = self._slots[: bucket.rows], _TRUNCATED if bucket.truncates else _WHOLE
        if not bucket.staged:
            return [lambda slots: self._round(slots, bucket.steps, kind)]
        return [
            lambda slots: self._round.draft(slots, bucket.steps, kind),
            lambda chain: self._round.forward(slots, chain, self._round.rows(slots, chain.shape[1])),
        ]


def _padded(rows: int) -> int:
    return 1 << (rows - 1).bit_length()
