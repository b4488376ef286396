"""Attention by packages whose calls are causal or without a mask: how a step becomes two of them, and a kernel.

Knows spans, and which rows of them a causal call serves. Does not know a package. Committed rows, and chains at the
committed end, are one causal call over pages. Rows of spans with trees read what all of them see in a second call,
without a mask, and go on from there above it (nodes.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from distspec.attention.base import Span
from distspec.attention.nodes import Nodes, NodesPlan
from distspec.copies import integers
from distspec.kv.pool import KVPool

Call = TypeVar("Call")


@dataclass(frozen=True, slots=True)
class Part:
    """All rows of a span, the first of which is row `start` of the step, against the first `keys` of the span."""

    span: Span
    start: int
    keys: int


@dataclass(frozen=True, slots=True)
class Rows(Generic[Call]):
    """A call and its rows of the step, int64; None: all of them in order."""

    call: Call
    rows: Tensor | None

    def of(self, q: Tensor) -> Tensor:
        return q if self.rows is None else q.index_select(0, self.rows)


@dataclass(frozen=True, slots=True)
class Plan(Generic[Call]):
    """write: int64 [rows], where keys and values go. causal: spans of committed rows and of chains; shared: the keys
    that all rows of a tree's span see, where there are any; nodes: what comes above."""

    write: Tensor
    causal: Rows[Call] | None
    shared: Rows[Call] | None
    nodes: NodesPlan | None


class CallingBackend(ABC, Generic[Call]):
    """See AttentionBackend. unit: of the package's log-sums, see nodes.py."""

    unit: ClassVar[float]

    def __init__(self, pool: KVPool, page_size: int, num_heads: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._device = pool.data.device
        self._layers = [(self._paged(keys), self._paged(values)) for keys, values in pool.layers]
        self._nodes = Nodes(pool, page_size, num_heads)

    @abstractmethod
    def _call(self, parts: Sequence[Part], causal: bool) -> Call:
        """What the package needs to be told of these rows; no part is without keys. causal: the last row of each sees
        all its keys, the one before one fewer, and so on; else each row sees all."""

    @abstractmethod
    def _run(self, call: Call, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Results [rows, heads, dim], contiguous, and log-sums float32 [rows, heads]; q: [rows, heads, key_dim]."""

    def plan(self, spans: Sequence[Span]) -> Plan[Call]:
        starts = list(accumulate((span.rows for span in spans), initial=0))
        straight = list(zip(map(straightened, spans), starts, strict=False))
        chains = [Part(span, start, span.length) for span, start in straight if not span.nodes]
        trees = [Part(span, start, span.length - span.suffix) for span, start in straight if span.nodes]
        trees.sort(key=lambda part: not part.keys)
        return Plan(
            write=integers([location for span in spans for location in span.write], self._device),
            causal=self._rows(chains, starts[-1], causal=True),
            shared=self._rows([part for part in trees if part.keys], starts[-1], causal=False),
            nodes=self._nodes.plan([part.span for part in trees], [part.start for part in trees]) if trees else None,
        )

    def read(self, plan: Plan[Call], layer: int, q: Tensor) -> Tensor:
        """q: [rows, heads, key_dim]. Returns [rows, heads * dim] in its dtype."""
        committed = None
        if plan.causal is not None:
            committed, _ = self._run(plan.causal.call, layer, plan.causal.of(q))
            if plan.causal.rows is None:
                return committed.flatten(1)
        out = torch.empty(*q.shape[:2], self._pool.layers[0][1].shape[-1], dtype=q.dtype, device=q.device)
        if plan.causal is not None and plan.causal.rows is not None and committed is not None:
            out.index_copy_(0, plan.causal.rows, committed)
        if plan.nodes is not None:
            found = None if plan.shared is None else self._run(plan.shared.call, layer, plan.shared.of(q))
            self._nodes.read(plan.nodes, layer, q, found, self.unit, out)
        return out.flatten(1)

    def _paged(self, plane: Tensor) -> Tensor:
        """[pages, page_size, kv_heads, dim], of what is [locations + 1, kv_heads, dim]."""
        return plane[:-1].view(-1, self._page_size, *plane.shape[1:])

    def _rows(self, parts: Sequence[Part], total: int, causal: bool) -> Rows[Call] | None:
        if not parts:
            return None
        rows = [row for part in parts for row in range(part.start, part.start + part.span.rows)]
        return Rows(self._call(parts, causal), None if rows == list(range(total)) else integers(rows, self._device))


def straightened(span: Span) -> Span:
    """A span whose nodes are a chain at the committed end, as one of committed rows; others as they are."""
    end = span.length
    if not span.nodes or any(set(seen) != set(range(end, end + i)) for i, seen in enumerate(span.nodes, 1)):
        return span
    count = len(span.nodes)
    return Span(span.pages, end + count, span.suffix + count, (), span.write)
