"""CUDA graphs of the forward: one launch instead of one for each kernel.

Knows buckets, and the buffer that the plan of each step is copied to. Does not know models, slots, or how a plan is
laid out. A step is padded to its bucket: rows that pad write to the pool's spare location and are not read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from distspec.attention import Bucket, StaticPlans
from distspec.copies import put
from distspec.engine.batch import Batch
from distspec.engine.capture import Capture, Captured, captured

log = logging.getLogger(__name__)

LARGEST = 256
"""Rows of the largest graph. Larger steps are prefill, where launches take less time than kernels."""

_MOST_PAGES = 2**20
"""Page numbers that the buffer holds, at most; a step that looks at more is launched kernel by kernel."""


class Forward(Protocol):
    """One forward, features written."""

    def __call__(self, tokens: Tensor, positions: Tensor, plan: object) -> Tensor:
        """tokens, positions: int64 [rows]. Returns logits: float32 [rows, vocab]."""
        ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """rows: of a step, at most. scratch: indices above its length that the nodes of a sequence take. pages: that all
    rows of a step look at together. vocab: logits of a row."""

    rows: int
    scratch: int
    pages: int
    vocab: int


class Graphs:
    """Graphs of a forward for 1, 2, 4... rows, captured when first wanted or before. last: the bucket of the last step
    that had one."""

    def __init__(
        self, forward: Forward, plans: StaticPlans, sizes: Sizes, capture: Capture, device: torch.device
    ) -> None:
        self._forward = forward
        self._plans = plans
        self._capture = capture
        self._scratch = sizes.scratch
        self._graphs: dict[Bucket, Captured[None] | None] = {}
        self.last: Bucket | None = None
        self._logits = _logits(min(LARGEST, 1 << (sizes.rows - 1).bit_length()), sizes.vocab, device)
        self._buckets = [
            bucket
            for power in reversed(range(self.rows.bit_length()))
            for bucket in plans.buckets(1 << power, sizes.scratch)
        ]
        room = max(4 * bucket.rows + len(plans.lay_out([], bucket)) for bucket in self._buckets)  # and what is borrowed
        self._buffer = torch.zeros(room + min(sizes.pages, _MOST_PAGES), dtype=torch.int64, device=device)

    @property
    def rows(self) -> int:
        """Of the largest graph."""
        return len(self._logits)

    @property
    def captured(self) -> frozenset[Bucket]:
        return frozenset(bucket for bucket, graph in self._graphs.items() if graph is not None)

    def prepare(self, only_largest: bool = False) -> None:
        """Capture them now, largest first, so that the others reuse its memory. only_largest: those of most rows."""
        for bucket in self._buckets:
            if bucket.rows == self.rows or not only_largest:
                self._graph(bucket)

    def run(self, batch: Batch) -> Tensor | None:
        """Logits of a step, float32 [rows, vocab], which the next call overwrites; None if it has no graph here, as
        where memory is too short for it."""
        rows = 1 << (len(batch.tokens) - 1).bit_length()
        bucket = self._plans.bucket(batch.spans, rows, self._scratch) if rows <= self.rows else None
        if bucket is None:
            return None
        padding = [0] * (rows - len(batch.tokens))
        integers = [*batch.tokens, *padding, *batch.positions, *padding, *self._plans.lay_out(batch.spans, bucket)]
        borrowed = batch.borrowed()
        integers += borrowed  # no plan reads so far
        graph = self._graph(bucket) if len(integers) <= len(self._buffer) else None
        if graph is None:
            return None
        put(integers, self._buffer[: len(integers)])
        batch.settle(self._buffer[:rows], self._buffer[len(integers) - len(borrowed) : len(integers)])
        self.last = bucket
        graph.replay()
        return self._logits[: len(batch.tokens)]

    def replay(self, bucket: Bucket) -> None:
        """Once more what `run` did last for this bucket."""
        graph = self._graphs[bucket]
        assert graph is not None
        graph.replay()

    def _graph(self, bucket: Bucket) -> Captured[None] | None:
        """Of a step of padding: what the buffer holds decides nothing of what is launched."""
        if bucket not in self._graphs:
            idle = [0] * 2 * bucket.rows + self._plans.lay_out([], bucket)
            put(idle, self._buffer[: len(idle)])
            what = f"steps of {bucket.rows} rows"
            self._graphs[bucket] = captured(self._capture, partial(self._compute, bucket), what)
        return self._graphs[bucket]

    def _compute(self, bucket: Bucket) -> None:
        tokens, positions, rest = self._buffer.split_with_sizes(
            [bucket.rows, bucket.rows, len(self._buffer) - 2 * bucket.rows]
        )
        logits = self._forward(tokens, positions, self._plans.bind(rest, bucket))
        self._logits[: bucket.rows].copy_(logits)


def _logits(rows: int, vocab: int, device: torch.device) -> Tensor:
    """float32 [rows, vocab], or half as many rows, and so on, as memory allows."""
    try:
        return torch.empty(rows, vocab, dtype=torch.float32, device=device)
    except torch.cuda.OutOfMemoryError:
        if rows == 1:
            raise
        log.warning("no CUDA graph of %d rows: out of memory", rows)
    return _logits(rows // 2, vocab, device)
