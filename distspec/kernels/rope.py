"""From the product of a qkv matrix to rotated queries, and keys and values in their pages.

Knows heads, rotary tables and locations. Does not know sequences, or who attends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from distspec.kernels.launch import early, in_turn


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of query and key heads before rotary, as Qwen3 has them. query, key: [head_dim]."""

    query: Tensor
    key: Tensor
    eps: float


@triton.jit
def _load_halves(at, mask, DIM: tl.constexpr):
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return a, tl.load(at + DIM // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _turn(a, b, cos, sin, weight, eps, lane, inside, DIM: tl.constexpr, NORM: tl.constexpr):
    """Heads [n, half] in two halves, normed and rotated: (a cos - b sin, b cos + a sin)."""
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
        a = a * scale * tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
        b = b * scale * tl.load(weight + DIM // 2 + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def number(x, there):
    """As what lies `there` is kept, 0 where that is no finite number: attention reads the rest of a page too, and gives
    it the weight 0, which makes no number either of what an earlier owner could not compute."""
    kept = x.to(there.dtype.element_ty)
    return tl.where(tl.abs(kept.to(tl.float32)) < float("inf"), kept, 0.0)


@triton.jit
def _store_halves(at, a, b, mask, DIM: tl.constexpr):
    tl.store(at, a.to(at.dtype.element_ty), mask=mask)
    tl.store(at + DIM // 2, b.to(at.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions", "write"])
def _kernel(qkv, table, positions, write, query_norm, key_norm, queries, keys, values, max_position, eps,
            HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, GROUP_PAD: tl.constexpr,
            HALF_PAD: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """One program for a row and a KV head, with the query heads that share it. All that it reads is asked for before
    anything is written, so that it waits for memory once."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, member = tl.arange(0, HALF_PAD), tl.arange(0, GROUP_PAD)
    inside = lane < DIM // 2
    position, location = tl.load(positions + row), tl.load(write + row)
    cos = tl.load(table + position * DIM + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
    # The table's sines of second halves have their own sign, those of first halves the opposite one.
    sines = table + (max_position + position) * DIM + DIM // 2
    sin = tl.load(sines + lane, mask=inside, other=0.0).to(tl.float32)[None, :]
    in_turn(EARLY)
    line = qkv + row * ((HEADS + 2 * KV_HEADS) * DIM)
    several = (member < GROUP)[:, None] & inside[None, :]
    own = (kv_head * GROUP + member)[:, None] * DIM + lane[None, :]
    q1, q2 = _load_halves(line + own, several, DIM)
    one = (tl.arange(0, 1) == 0)[:, None] & inside[None, :]
    key = line + (HEADS + kv_head) * DIM + lane[None, :]
    k1, k2 = _load_halves(key, one, DIM)
    v1, v2 = _load_halves(key + KV_HEADS * DIM, one, DIM)

    q1, q2 = _turn(q1, q2, cos, sin, query_norm, eps, lane, inside, DIM, NORM)
    k1, k2 = _turn(k1, k2, cos, sin, key_norm, eps, lane, inside, DIM, NORM)
    _store_halves(queries + row * (HEADS * DIM) + own, q1, q2, several, DIM)
    there = location * (KV_HEADS * DIM) + kv_head * DIM + lane[None, :]
    _store_halves(keys + there, number(k1, keys), number(k2, keys), one & (location >= 0), DIM)
    _store_halves(values + there, number(v1, values), number(v2, values), one & (location >= 0), DIM)


def rope_and_write(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    write: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotate queries and keys, normed before if `norms` says so, and write keys and values to their locations.

    qkv: [rows, (heads + 2 * kv_heads) * head_dim], contiguous; table: cosines and signed sines of every position,
    [2, max_position, head_dim]; positions: int64 [rows]; write: int64 [rows], a negative one writes nothing;
    keys, values: [locations, kv_heads, head_dim], written to, finite numbers alone. Positions, locations and the table
    are read ahead of kernels.launch.in_turn. Computed in float32. Returns queries [rows, heads, head_dim] in qkv's
    dtype.
    """
    rows, (_, kv_heads, dim) = qkv.shape[0], keys.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    queries = qkv.new_empty(rows, heads, dim)
    _kernel[(rows, kv_heads)](
        qkv,
        table,
        positions,
        write,
        norms.query if norms else qkv,
        norms.key if norms else qkv,
        queries,
        keys,
        values,
        table.shape[1],
        norms.eps if norms else 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        GROUP_PAD=triton.next_power_of_2(heads // kv_heads),
        HALF_PAD=triton.next_power_of_2(dim // 2),
        NORM=norms is not None,
        **early(),
        num_warps=1 if heads // kv_heads * dim <= 512 else 4,
    )
    return queries


def rope_and_write_reference(
    qkv: Tensor,
    table: Tensor,
    positions: Tensor,
    write: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    kv_heads, dim = keys.shape[1:]
    split = qkv.view(qkv.shape[0], -1, dim)
    heads = split.shape[1] - 2 * kv_heads
    q, k, v = split.float().split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q = F.rms_norm(q, (dim,), norms.query.float(), norms.eps)
        k = F.rms_norm(k, (dim,), norms.key.float(), norms.eps)
    cos, sin = table[:, positions].float().unsqueeze(2)
    q, k = (x * cos + x.roll(dim // 2, -1) * sin for x in (q, k))
    kept = write >= 0
    keys.index_copy_(0, write[kept], k[kept].to(keys.dtype))
    values.index_copy_(0, write[kept], v[kept].to(values.dtype))
    return q.to(qkv.dtype)
