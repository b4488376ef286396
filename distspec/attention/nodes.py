"""Attention of trees, second part: rows go on above the keys that an earlier call without a mask has read.

Knows spans, the integers that the kernel reads, and what the earlier call left: its results and their log-sums. Does
not know who made that call. The parts are merged by their log-sum-exp, as in FlashAttention (arXiv 2205.14135) and
Hydragen (arXiv 2402.05099), in the launch that reads the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from distspec.attention import kernels, tiles
from distspec.attention.base import Span
from distspec.copies import integers
from distspec.kv.pool import KVPool

NATURAL = math.log2(math.e)
"""The unit of natural logarithms; that of binary ones is 1."""

_LANES = 64
_KEYS = 64
_LATENT_LANES = 16
_LATENT_KEYS = 32
"""Rows x heads of a program, at most, and keys that it reads at once: what lies above is short."""


@dataclass(frozen=True, slots=True)
class NodesPlan:
    """items: int64 [n, 7], each the work of one program: first row in the step, among these spans' own, rows, offset
    of the page table, first key, length of the span, end of the keys. The rest is int64, see tiles.py; limits and
    masks are of these spans' rows alone. lanes: rows x heads of a program, a power of two."""

    items: Tensor
    pages: Tensor
    limits: Tensor
    masks: Tensor
    words: int
    lanes: int


class Nodes:
    """The second part, over one pool."""

    def __init__(self, pool: KVPool, page_size: int, num_heads: int) -> None:
        kv_heads, key_dim = pool.data.shape[-2:]
        self._pool = pool
        self._page_size = page_size
        self._most, self._keys = (_LATENT_LANES, _LATENT_KEYS) if pool.latent else (_LANES, _KEYS)
        self._groups = tiles.groups(num_heads, self._most) if pool.latent else kv_heads
        self._group = num_heads // self._groups
        self._dim = pool.latent or key_dim
        self._rest = key_dim - self._dim
        self._precision = "ieee" if pool.data.dtype == torch.float32 else "tf32"
        self._offset = triton.language.int32 if pool.layers[0][0].numel() < 2**31 else triton.language.int64

    def plan(self, spans: Sequence[Span], starts: Sequence[int]) -> NodesPlan:
        """Of spans whose rows have read what all of them see: all keys but their own and those of scratch. starts: the
        first row of each in the step. The earlier call had the rows of the first spans, in this order; those of the
        others, which have no such keys, are read here alone."""
        lanes = max(span.rows for span in spans) * self._group
        lanes = max(16, triton.next_power_of_2(min(lanes, self._most)), triton.next_power_of_2(self._group))
        words = tiles.words(spans)
        pages, tables = tiles.tables(spans, self._page_size)
        items: list[int] = []
        place = 0
        for span, start, own in zip(spans, starts, tiles.tiles(spans, tables, lanes // self._group), strict=True):
            keys = span.length - span.suffix, span.length
            for tile in own:
                items += (start + tile.row - place, tile.row, tile.rows, tile.table, *keys, tile.extent)
            place += span.rows
        limits = [limit for span in spans for limit in tiles.limits(span)]
        masks = [word for span in spans for word in tiles.masks(span, words)]
        parts = [items, pages, limits, masks]
        device = integers([each for part in parts for each in part], self._pool.data.device)
        found, table, limit, mask = device.split_with_sizes([len(part) for part in parts])
        return NodesPlan(found.view(-1, 7), table, limit, mask, words, lanes)

    def read(
        self, plan: NodesPlan, layer: int, q: Tensor, found: tuple[Tensor, Tensor] | None, unit: float, out: Tensor
    ) -> None:
        """Write what these rows see in all to their rows of `out`.

        q: [rows of the step, heads, key_dim]; found: of the earlier call, if there was one: results [rows, heads, dim],
        contiguous, and log-sums, float32 [rows, heads], times `unit` binary logarithms; out: [rows of the step, heads,
        dim], contiguous.
        """
        keys, values = self._pool.layers[layer]
        pad, rest_pad = (max(16, triton.next_power_of_2(n)) for n in (self._dim, self._rest))
        first, log_sums = (out[:0], out[:0, :, 0]) if found is None else found
        kernels.join[len(plan.items), self._groups](
            q, keys, values, first, log_sums, out, plan.items, plan.pages, plan.limits, plan.masks,
            q.stride(0), q.stride(1), log_sums.stride(0), log_sums.stride(1), len(first), plan.words,
            (self._dim + self._rest) ** -0.5 * NATURAL, unit,
            GROUPS=self._groups, GROUP=self._group, DIM=self._dim, DIM_PAD=pad, REST=self._rest, REST_PAD=rest_pad,
            PAGE=self._page_size, M=plan.lanes, N=self._keys, PRECISION=self._precision, OFFSET=self._offset,
            num_warps=4,
        )  # fmt: skip
