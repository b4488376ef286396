"""Attention by FlashAttention (arXiv 2205.14135; version 3, arXiv 2407.08608, on Hopper), as vLLM packages it.

Knows that package's call, and how spans become calls of it. Does not know why a row sees what it sees. Committed rows
and chains at the committed end are one causal call over pages. Rows of spans with trees read what all of them see in a
second call, without a mask, and go on from there above it (nodes.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from distspec.attention.available import flash_package
from distspec.attention.base import Span
from distspec.attention.nodes import NATURAL, Nodes, NodesPlan, shared
from distspec.errors import InvalidValue
from distspec.kv.pool import KVPool

_PAGES = 16
"""Page sizes are multiples of this: version 2 has no others."""


@dataclass(frozen=True, slots=True)
class _Call:
    """queries: int64 [rows], or None for all rows of the step in order. starts: int32 [spans + 1], where the rows of
    each span begin. lengths: int32 [spans], keys of each. tables: int32 [spans, pages]. most_rows, most_keys: of a
    span."""

    queries: Tensor | None
    starts: Tensor
    lengths: Tensor
    tables: Tensor
    most_rows: int
    most_keys: int


@dataclass(frozen=True, slots=True)
class Plan:
    """write: int64 [rows], where keys and values go. causal: spans of committed rows and of chains; trees: spans with
    other nodes, the call without a mask and what comes above."""

    write: Tensor
    causal: _Call | None
    trees: tuple[_Call, NodesPlan] | None


class FlashBackend:
    """See AttentionBackend."""

    def __init__(self, pool: KVPool, page_size: int, num_heads: int) -> None:
        """Raises InvalidValue for a page size that the package does not take."""
        if page_size % _PAGES:
            raise InvalidValue("engine.page_size", page_size, f"a multiple of {_PAGES} for FlashAttention")
        self._pool = pool
        self._page_size = page_size
        self._device = pool.data.device
        pages = pool.spare // page_size
        paged = (pages, page_size, *pool.data.shape[3:])
        self._layers = [
            (keys[: pool.spare].view(paged), values[: pool.spare].view(paged)) for keys, values in pool.layers
        ]
        self._nodes = Nodes(pool, page_size, num_heads)
        self._function = _load()
        # Version 3 is for Hopper alone; whatever comes after it runs version 2.
        self._version = 3 if torch.cuda.get_device_capability(self._device)[0] == 9 else 2

    def plan(self, spans: Sequence[Span]) -> Plan:
        starts = list(accumulate((span.rows for span in spans), initial=0))
        straight = list(zip(map(straightened, spans), starts, strict=False))
        chains = [(span, start, span.length) for span, start in straight if not span.nodes]
        trees = [(span, start, shared(span)) for span, start in straight if span.nodes]
        total = starts[-1]
        nodes = self._nodes.plan([span for span, *_ in trees], [start for _, start, _ in trees]) if trees else None
        return Plan(
            write=self._longs([location for span in spans for location in span.write]),
            causal=self._call(chains, total) if chains else None,
            trees=(self._call(trees, total), nodes) if nodes else None,
        )

    def read(self, plan: Plan, layer: int, q: Tensor) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if plan.causal is not None:
            committed, _ = self._run(plan.causal, layer, q, causal=True)
            if plan.causal.queries is None:
                return committed.flatten(1)
            out.index_copy_(0, plan.causal.queries, committed)
        if plan.trees is not None:
            call, nodes = plan.trees
            first, log_sums = self._run(call, layer, q, causal=False)
            self._nodes.read(nodes, layer, q, first, log_sums.t(), NATURAL, out)
        return out.flatten(1)

    def _run(self, call: _Call, layer: int, q: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Outputs [rows, heads, dim] and log-sums float32 [heads, rows]."""
        keys, values = self._layers[layer]
        found: tuple[Tensor, Tensor] = self._function(
            q if call.queries is None else q.index_select(0, call.queries),
            keys,
            values,
            max_seqlen_q=call.most_rows,
            cu_seqlens_q=call.starts,
            max_seqlen_k=call.most_keys,
            seqused_k=call.lengths,
            block_table=call.tables,
            causal=causal,
            return_softmax_lse=True,
            fa_version=self._version,
        )
        return found

    def _call(self, some: Sequence[tuple[Span, int, int]], total: int) -> _Call:
        """All rows of each span, the first of which is given, against so many of its keys."""
        queries = [row for span, start, _ in some for row in range(start, start + span.rows)]
        counts = [-(-keys // self._page_size) for *_, keys in some]
        width = max(1, *counts)
        tables = array("q")
        for (span, *_), count in zip(some, counts, strict=True):
            tables.extend(span.pages[:count])
            tables.extend([0] * (width - count))
        return _Call(
            queries=None if len(queries) == total else self._longs(queries),
            starts=self._ints(accumulate((span.rows for span, *_ in some), initial=0)),
            lengths=self._ints(keys for *_, keys in some),
            tables=self._ints(tables).view(len(some), width),
            most_rows=max(span.rows for span, *_ in some),
            most_keys=max(1, *(keys for *_, keys in some)),
        )

    def _longs(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)

    def _ints(self, values: Any) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32).to(self._device, non_blocking=True)


def _load() -> Callable[..., Any]:
    name = flash_package()
    if name is None:
        raise ImportError("neither vllm.vllm_flash_attn nor vllm_flash_attn is installed")
    function: Callable[..., Any] = import_module(name).flash_attn_varlen_func
    return function


def straightened(span: Span) -> Span:
    """A span whose nodes are a chain at the committed end, as one of committed rows; others as they are."""
    end = span.length
    if not span.nodes or any(set(seen) != set(range(end, end + i)) for i, seen in enumerate(span.nodes, 1)):
        return span
    count = len(span.nodes)
    return Span(span.pages, end + count, span.suffix + count, (), span.write)
