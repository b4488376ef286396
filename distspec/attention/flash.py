"""Attention by FlashAttention (arXiv 2205.14135; version 3, arXiv 2407.08608, on Hopper), as vLLM packages it.

Knows that package's call, and how spans become calls of it. Does not know why a row sees what it sees. Committed rows
and chains at the committed end are one causal call over pages. Nodes of trees see the committed positions in a second
call without a mask, and the scratch in a masked one of torch; the two are merged by their log-sum-exp.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from distspec.attention.base import Span
from distspec.attention.parts import part
from distspec.errors import InvalidValue
from distspec.kv.pool import KVPool

_PAGES = 16
"""Page sizes are multiples of this: version 2 has no others."""

_ALIGNED = 8
"""Columns of a mask come in multiples of this: rows of it begin at multiples of 16 bytes."""


def flash_package() -> str | None:
    """Name of the package that could be imported. Imports nothing: vllm takes seconds."""
    vllm = PathFinder.find_spec("vllm")
    inside = vllm.submodule_search_locations if vllm is not None else None
    if inside and PathFinder.find_spec("vllm_flash_attn", list(inside)) is not None:
        return "vllm.vllm_flash_attn"
    return "vllm_flash_attn" if PathFinder.find_spec("vllm_flash_attn") is not None else None


def missing_for_flash(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlashAttention cannot run here; None if it can."""
    if device.type != "cuda":
        return f"FlashAttention needs CUDA, the device is {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"FlashAttention needs float16 or bfloat16, the dtype is {dtype}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "FlashAttention needs compute capability 8.0"
    if flash_package() is None:
        return "neither vllm.vllm_flash_attn nor vllm_flash_attn is installed"
    return None


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
class _Scratch:
    """Nodes against the scratch of their spans, padded. queries: int64 [spans * rows], among the rows of the prefix
    call; keys: int64 [spans * width], locations; mask: 0 or -inf [spans, 1, rows, width]. real: int64 [rows of the
    prefix call], their places among the padded."""

    spans: int
    rows: int
    queries: Tensor
    keys: Tensor
    mask: Tensor
    real: Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """write: int64 [rows], where keys and values go. causal: committed rows and chains; prefix and scratch: the two
    parts of nodes. back: int64 [rows], the place of each row in the outputs of causal and prefix one after the other;
    None where they are the rows in order."""

    write: Tensor
    causal: _Call | None
    prefix: _Call | None
    scratch: _Scratch | None
    back: Tensor | None


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
        self._function = _load()
        # Version 3 is for Hopper alone; whatever comes after it runs version 2.
        self._version = 3 if torch.cuda.get_device_capability(self._device)[0] == 9 else 2

    def plan(self, spans: Sequence[Span]) -> Plan:
        straight = [straightened(span) for span in spans]
        starts = list(accumulate((span.rows for span in spans), initial=0))
        first = [range(at, at + span.suffix) for at, span in zip(starts, straight, strict=False)]
        rest = [range(at + span.suffix, at + span.rows) for at, span in zip(starts, straight, strict=False)]
        trees = [span for span in straight if span.nodes]
        causal = self._call(straight, first, starts[-1])
        order = [row for rows in (*first, *rest) for row in rows]
        back = None
        if order != list(range(starts[-1])):
            place = {row: at for at, row in enumerate(order)}
            back = self._longs([place[row] for row in range(starts[-1])])
        return Plan(
            write=self._longs([location for span in spans for location in span.write]),
            causal=causal,
            prefix=self._call(straight, rest, starts[-1]),
            scratch=self._scratch(trees) if trees else None,
            back=back,
        )

    def read(self, plan: Plan, layer: int, q: Tensor) -> Tensor:
        outputs = []
        if plan.causal is not None:
            outputs.append(self._run(plan.causal, layer, q, causal=True)[0])
        if plan.prefix is not None and plan.scratch is not None:
            first, log_sums = self._run(plan.prefix, layer, q, causal=False)
            own = q if plan.prefix.queries is None else q.index_select(0, plan.prefix.queries)
            second, second_sums = self._below(plan.scratch, layer, own)
            # A prefix of no keys has a log-sum of -inf in version 3 and +inf in version 2.
            share = torch.sigmoid(log_sums.t().nan_to_num(posinf=-torch.inf) - second_sums)
            outputs.append(torch.lerp(second, first, share.to(q.dtype).unsqueeze(-1)))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return (output if plan.back is None else output.index_select(0, plan.back)).flatten(1)

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

    def _below(self, scratch: _Scratch, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [rows, heads, dim] and log-sums float32 [rows, heads] of nodes over the scratch."""
        keys, values = (x.index_select(0, scratch.keys) for x in self._pool.layers[layer])
        heads, dim, kv_heads = q.shape[1], q.shape[2], keys.shape[1]
        group = heads // kv_heads
        keys, values = (x.view(scratch.spans, -1, kv_heads, dim).transpose(1, 2) for x in (keys, values))
        q = q.index_select(0, scratch.queries).view(scratch.spans, scratch.rows, kv_heads, group, dim)
        q = q.permute(0, 2, 1, 3, 4).reshape(scratch.spans, kv_heads, scratch.rows * group, dim)
        mask = scratch.mask.repeat_interleave(group, dim=2).expand(-1, kv_heads, -1, -1)
        output, sums = part(q, keys, values, mask)
        output = output.view(scratch.spans, kv_heads, scratch.rows, group, dim).permute(0, 2, 1, 3, 4)
        sums = sums.reshape(scratch.spans, kv_heads, scratch.rows, group).permute(0, 2, 1, 3)
        output, sums = output.reshape(-1, heads, dim), sums.reshape(-1, heads)
        return output.index_select(0, scratch.real), sums.index_select(0, scratch.real)

    def _call(self, spans: Sequence[Span], rows: Sequence[range], total: int) -> _Call | None:
        """These rows of each span against its committed positions."""
        some = [(span, own) for span, own in zip(spans, rows, strict=True) if own]
        if not some:
            return None
        queries = [row for _, own in some for row in own]
        counts = [-(-span.length // self._page_size) for span, _ in some]
        width = max(1, *counts)
        tables = array("q")
        for (span, _), count in zip(some, counts, strict=True):
            tables.extend(span.pages[:count])
            tables.extend([0] * (width - count))
        return _Call(
            queries=None if len(queries) == total else self._longs(queries),
            starts=self._ints(accumulate((len(own) for _, own in some), initial=0)),
            lengths=self._ints(span.length for span, _ in some),
            tables=self._ints(tables).view(len(some), width),
            most_rows=max(len(own) for _, own in some),
            most_keys=max(1, *(span.length for span, _ in some)),
        )

    def _scratch(self, trees: Sequence[Span]) -> _Scratch:
        rows = max(len(span.nodes) for span in trees)
        width = -(-max(span.extent - span.length for span in trees) // _ALIGNED) * _ALIGNED
        starts = list(accumulate((len(span.nodes) for span in trees), initial=0))
        queries, keys, seen, real = [], [], [], []
        for i, span in enumerate(trees):
            last = len(span.nodes) - 1
            queries += [starts[i] + min(row, last) for row in range(rows)]
            real += [i * rows + row for row in range(len(span.nodes))]
            # Behind its end a table is filled up with the span's last key: padding must not read a stranger's.
            keys += [self._location(span, min(span.length + at, span.extent - 1)) for at in range(width)]
            for row in range(rows):
                seen += [(i * rows + row) * width + index - span.length for index in span.nodes[min(row, last)]]
        mask = torch.full((len(trees), 1, rows, width), -torch.inf, dtype=self._pool.data.dtype, device=self._device)
        mask.view(-1)[self._longs(seen)] = 0
        return _Scratch(len(trees), rows, self._longs(queries), self._longs(keys), mask, self._longs(real))

    def _location(self, span: Span, index: int) -> int:
        return span.pages[index // self._page_size] * self._page_size + index % self._page_size

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
