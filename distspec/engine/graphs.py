"""CUDA graphs of the forward: one launch instead of one for each kernel.

Knows buckets, the buffer that the plan of each step is copied to, and replays. Does not know models, slots, or how a
plan is laid out. A step is padded to its bucket: rows that pad write to the pool's spare location and are not read.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from distspec.attention import Bucket, StaticPlans
from distspec.copies import put
from distspec.engine.batch import Batch

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
    """Graphs of a forward for 1, 2, 4... rows, captured when made. last: the bucket of the last step that had one."""

    def __init__(self, forward: Forward, plans: StaticPlans, sizes: Sizes, device: torch.device) -> None:
        """Captures largest first, so that the others reuse its memory. Sizes that run out of memory are left out with a
        warning."""
        self._forward = forward
        self._plans = plans
        self._scratch = sizes.scratch
        self._graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
        self.last: Bucket | None = None
        self._pool = torch.cuda.graph_pool_handle()
        self._logits = _logits(min(LARGEST, 1 << (sizes.rows - 1).bit_length()), sizes.vocab, device)
        most = len(self._logits)
        buckets = [
            bucket
            for power in reversed(range(most.bit_length()))
            for bucket in plans.buckets(1 << power, sizes.scratch)
        ]
        room = max(2 * bucket.rows + len(plans.lay_out([], bucket)) for bucket in buckets)
        self._buffer = torch.zeros(room + min(sizes.pages, _MOST_PAGES), dtype=torch.int64, device=device)
        self._capture_all(buckets, device)

    @property
    def captured(self) -> frozenset[Bucket]:
        return frozenset(self._graphs)

    def bucket(self, batch: Batch) -> Bucket | None:
        """Whose graph a step replays; None if it has none."""
        rows = 1 << (len(batch.tokens) - 1).bit_length()
        bucket = self._plans.bucket(batch.spans, rows, self._scratch)
        return bucket if bucket in self._graphs else None

    def run(self, batch: Batch) -> Tensor | None:
        """Logits of a step, float32 [rows, vocab], which the next call overwrites; None if it has no graph here."""
        bucket = self.bucket(batch)
        if bucket is None:
            return None
        padding = [0] * (bucket.rows - len(batch.tokens))
        integers = [*batch.tokens, *padding, *batch.positions, *padding, *self._plans.lay_out(batch.spans, bucket)]
        if len(integers) > len(self._buffer):
            return None
        put(integers, self._buffer[: len(integers)])
        self.last = bucket
        self.replay(bucket)
        return self._logits[: len(batch.tokens)]

    def replay(self, bucket: Bucket) -> None:
        """Once more what `run` did last for this bucket."""
        self._graphs[bucket].replay()

    def _capture_all(self, buckets: list[Bucket], device: torch.device) -> None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        failed = []
        for bucket in buckets:
            try:
                self._graphs[bucket] = self._capture(bucket, stream)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failed.append(bucket.rows)
                torch.cuda.empty_cache()
        if failed:
            log.warning(
                "out of memory while capturing CUDA graphs of %s rows: such steps are launched kernel by kernel; lower "
                "engine.gpu_memory_utilization, or engine.max_num_seqs",
                sorted(set(failed)),
            )

    def _capture(self, bucket: Bucket, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """A step of padding is captured: what the buffer holds decides nothing of what is launched."""
        idle = [0] * 2 * bucket.rows + self._plans.lay_out([], bucket)
        put(idle, self._buffer[: len(idle)])
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute(bucket)  # kernels are compiled, workspaces allocated
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, as links of other workers do.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            self._compute(bucket)
        return graph

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


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this, or what it came from, is that: a capture that fails ends with an error of its own. The driver and
    Triton, who need memory of the device for graphs and kernels, only say so."""
    while error is not None and not isinstance(error, torch.cuda.OutOfMemoryError):
        if isinstance(error, RuntimeError) and "out of memory" in str(error):
            return True
        error = error.__context__
    return error is not None
