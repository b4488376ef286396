"""Attention by torch's scaled_dot_product_attention: the reference, on any device.

Knows how spans become index tensors and masks. Does not know why a row sees what it sees.

Spans with few rows (decode tokens, verify trees) are padded into common calls with neighbours of about their
size, query heads of one KV head lying side by side as rows, so that keys are read once per KV head. A span
with many rows (a prefill chunk) is a call of its own. Keys and values are gathered by location; a call of one
sequence whose pages are neighbours reads them in place. Where it pays, the keys that all rows of a call see, the
committed prefix, are attended apart from the few that need a mask.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from distspec.attention.base import Places, Span
from distspec.attention.parts import two_parts
from distspec.copies import to_device
from distspec.kv.pool import KVPool

_SHORT_ROWS = 16
_SHORT_ROWS_CUDA = 128
"""Spans up to this many rows share calls. Longer ones would pay more for padding than a call costs."""

_APART = 5000
"""Keys that all rows must see for two parts to pay, on a GPU in half precision, where each operation is launched by the
host: a tree of 64 nodes then breaks even (175 us a layer on an H200; of 16,000 keys, 174 us instead of 433). In a
captured graph it would at about 1,500 (of 4,000 keys, 47 us instead of 114). In float32 and on a CPU it never does:
there no kernel is faster for being spared the mask."""

_ALIGNED = 8
"""Columns of a mask come in multiples of this."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention of [batch] sequences, [rows] queries and [keys] keys each.

    queries: int64 [batch * rows], or None for all rows of the step in order. start: location of the first key
    where all are neighbours; otherwise locations: int64 [batch * keys]. apart: so many keys, the first, are a part
    of their own that needs no mask. mask of the others: 0 or -inf, [batch, 1, queries of one KV head, keys - apart]
    if packed, [1, 1, rows, keys] if not, or None. causal: as torch means it.
    """

    batch: int
    rows: int
    keys: int
    queries: Tensor | None
    start: int
    locations: Tensor | None
    apart: int
    mask: Tensor | None
    causal: bool
    packed: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """write: int64 [rows], where keys and values go. back: int64 [rows], each row's place in the calls' outputs
    one after the other, or None where they are the rows in order."""

    write: Tensor
    calls: tuple[_Call, ...]
    back: Tensor | None


class SdpaBackend:
    """See AttentionBackend, and on a CPU DevicePlans, where reading a length from the device costs nothing; on a GPU
    that would wait. apart: fewest keys that make a part of their own; None: what is fastest here."""

    def __init__(self, pool: KVPool, page_size: int, num_heads: int, apart: int | None = None) -> None:
        self._pool = pool
        self._page_size = page_size
        self._group = num_heads // pool.data.shape[3]
        self._device = pool.data.device
        cuda = self._device.type == "cuda"
        self._short = _SHORT_ROWS_CUDA if cuda else _SHORT_ROWS
        # Torch's kernels that tell a log-sum have no values of other dimensions than keys.
        pays = cuda and pool.data.dtype != torch.float32 and not pool.latent
        self._apart = apart if apart is not None else _APART if pays else sys.maxsize

    def plan(self, spans: Sequence[Span]) -> Plan:
        starts = list(accumulate((span.rows for span in spans), initial=0))
        calls, order = [], []
        for group in _groups(spans, self._short):
            rows = max(spans[i].rows for i in group)
            # A padded row repeats the last one of its span, mask and all; nobody reads its output.
            queries = [starts[i] + min(row, spans[i].rows - 1) for i in group for row in range(rows)]
            calls.append(self._call([spans[i] for i in group], rows, queries, starts[-1]))
            order += queries
        place = {row: at for at, row in reversed(list(enumerate(order)))}
        back = [place[row] for row in range(starts[-1])]
        return Plan(
            write=self._tensor([location for span in spans for location in span.write]),
            calls=tuple(calls),
            back=None if back == list(range(len(order))) else self._tensor(back),
        )

    def chains(self, places: Places, count: int) -> Plan:
        tables, size, spare = places.tables.tolist(), self._page_size, self._pool.spare
        spans = []
        for row, length in zip(places.rows.tolist(), places.lengths[places.rows].tolist(), strict=True):
            pages, first = tables[row], length + places.offset
            pads = row == len(tables) - 1 or first + count <= 0
            first = 0 if pads else first
            write = [
                spare if pads or at < 0 else pages[at // size] * size + at % size for at in range(first, first + count)
            ]
            spans.append(Span(pages[: -(-(first + count) // size)], first + count, count, (), write))
        return self.plan(spans)

    def steps(self, places: Places, count: int) -> list[Plan]:
        return [self.chains(replace(places, offset=places.offset + step), 1) for step in range(count)]

    def read(self, plan: Plan, layer: int, q: Tensor) -> Tensor:
        """q: [rows, heads, key_dim]. Returns [rows, heads * dim] in its dtype."""
        keys, values = self._pool.layers[layer]
        outputs = [_attend(call, q, keys, values, self._pool.latent) for call in plan.calls]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if plan.back is None else output.index_select(0, plan.back)

    def _call(self, spans: list[Span], rows: int, queries: list[int], total: int) -> _Call:
        keys = max(span.extent for span in spans)
        packed = rows <= self._short
        count = -(-keys // self._page_size)
        first = spans[0].pages[0]
        in_place = len(spans) == 1 and list(spans[0].pages[:count]) == list(range(first, first + count))
        causal = not packed and spans[0].suffix == spans[0].length == keys
        apart, mask = (0, None) if causal else self._mask(spans, rows, keys, packed)
        return _Call(
            batch=len(spans),
            rows=rows,
            keys=keys,
            queries=None if queries == list(range(total)) else self._tensor(queries),
            start=first * self._page_size,
            locations=None if in_place else self._locations(spans, keys, count),
            apart=apart,
            mask=mask,
            causal=causal,
            packed=packed,
        )

    def _locations(self, spans: list[Span], keys: int, count: int) -> Tensor:
        # A short table is filled up with the sequence's own first page: padding must not read a stranger's.
        tables = [[*span.pages[:count], *[span.pages[0]] * (count - len(span.pages))] for span in spans]
        offsets = torch.arange(self._page_size, device=self._device)
        locations = self._tensor(tables)[:, :, None] * self._page_size + offsets
        return locations.view(len(spans), -1)[:, :keys].reshape(-1)

    def _mask(self, spans: list[Span], rows: int, keys: int, packed: bool) -> tuple[int, Tensor | None]:
        """How many keys are a part of their own; for the others 0 where a row sees one and -inf elsewhere, or None if
        every row sees every key."""
        limits = [[_limit(span, min(row, span.rows - 1)) for row in range(rows)] for span in spans]
        least = min(map(min, limits))
        if least == keys:
            return 0, None
        # One less, so that every row has a key on the other side.
        apart = least - 1 if packed and least > self._apart else 0
        # CUDA kernels want the rows of a mask 16 bytes apart; the last few columns are cut off again.
        width = -(-(keys - apart) // _ALIGNED) * _ALIGNED
        seen = torch.arange(apart, apart + width, device=self._device) < self._tensor(limits)[:, :, None]
        nodes = [
            (i * rows + row) * width + index - apart
            for i, span in enumerate(spans)
            for row in range(span.suffix, rows if span.nodes else 0)
            for index in span.nodes[min(row, span.rows - 1) - span.suffix]
        ]
        if nodes:
            seen.view(-1)[self._tensor(nodes)] = True
        data = self._pool.data
        mask = torch.zeros(seen.shape, dtype=data.dtype, device=self._device).masked_fill_(~seen, -torch.inf)
        group = self._group if packed else 1
        mask = mask[:, None].expand(-1, group, -1, -1).reshape(len(spans), 1, group * rows, width)
        return apart, mask[..., : keys - apart]

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self._device)


def _groups(spans: Sequence[Span], most: int) -> list[list[int]]:
    """Indices of spans that share a call: those of up to `most` rows and the same order of magnitude, so that padding
    at most doubles."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, span in enumerate(spans):
        short = span.rows <= most
        groups.setdefault((span.rows.bit_length(), span.extent.bit_length()) if short else (-1, i), []).append(i)
    return list(groups.values())


def _limit(span: Span, row: int) -> int:
    """How many committed positions a row sees."""
    return span.length if row >= span.suffix else span.length - span.suffix + row + 1


def _found(call: _Call, paged: Tensor) -> Tensor:
    """What a call reads of keys or values [locations, kv_heads, dim]: [batch, kv_heads, keys, dim]."""
    at = call.locations
    paged = paged.narrow(0, call.start, call.keys) if at is None else paged.index_select(0, at)
    return paged.view(call.batch, call.keys, *paged.shape[1:]).transpose(1, 2)


def _attend(call: _Call, q: Tensor, keys: Tensor, values: Tensor, latent: int) -> Tensor:
    """q: [all rows, heads, dim]; keys, values: [locations, kv_heads, dim], values' own maybe; latent: see KVPool.
    Returns [batch * rows, heads * values' dim]."""
    heads, dim, kv_heads = q.shape[1], q.shape[2], keys.shape[1]
    if call.queries is not None:
        q = q.index_select(0, call.queries)
    keys = _found(call, keys)
    values = keys[..., :latent] if latent else _found(call, values)
    if not call.packed:
        q = q.transpose(0, 1)[None]
        output = F.scaled_dot_product_attention(q, keys, values, call.mask, is_causal=call.causal, enable_gqa=True)
        return output[0].transpose(0, 1).reshape(call.rows, -1)
    group = heads // kv_heads
    q = q.view(call.batch, call.rows, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(call.batch, kv_heads, group * call.rows, dim)
    if call.apart and call.mask is not None:
        output = two_parts(q, keys, values, call.apart, call.mask)
    else:
        output = F.scaled_dot_product_attention(q, keys, values, call.mask)
    output = output.view(call.batch, kv_heads, group, call.rows, values.shape[-1]).permute(0, 3, 1, 2, 4)
    return output.reshape(call.batch * call.rows, -1)
