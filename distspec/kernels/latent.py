"""From the products of latent attention to queries that meet latents, and latents in their pages.

Knows heads, rotary cosines and locations. Does not know sequences, or who attends.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from distspec.kernels.launch import early, in_turn
from distspec.kernels.rope import number

_HEADS = 8
"""Of a program: a few thousand numbers."""


@triton.jit
def _turned(at, rope, lane, mask, rows, DIM: tl.constexpr):
    """Pairs that lie side by side, from `at` on, rotated: (a cos - b sin, b cos + a sin). rope: of this row."""
    a = tl.load(at + 2 * lane, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + 2 * lane + 1, mask=mask, other=0.0).to(tl.float32)
    inside = lane < DIM // 2
    cos = tl.load(rope + lane, mask=inside, other=0.0).to(tl.float32)
    # The sines of second halves have their own sign, those of first halves the opposite one.
    sin = tl.load(rope + rows * DIM + DIM // 2 + lane, mask=inside, other=0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _store(there, lane, half, x, a, b, wide, turns, RANK: tl.constexpr, DIM: tl.constexpr):
    """A part in the latent space, and the halves of a rotary part behind it."""
    tl.store(there + lane, x.to(there.dtype.element_ty), mask=wide)
    tl.store(there + RANK + half, a.to(there.dtype.element_ty), mask=turns)
    tl.store(there + RANK + DIM // 2 + half, b.to(there.dtype.element_ty), mask=turns)


@triton.jit
def _queries_of(plain, turned, rope, queries, row, rows, block, turned_row, turned_head, scale, HEADS: tl.constexpr,
                RANK: tl.constexpr, RANK_PAD: tl.constexpr, DIM: tl.constexpr, HALF_PAD: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    lane, half = tl.arange(0, RANK_PAD)[None, :], tl.arange(0, HALF_PAD)[None, :]
    head = block * BLOCK + tl.arange(0, BLOCK)[:, None]
    wide, turns = (head < HEADS) & (lane < RANK), (head < HEADS) & (half < DIM // 2)
    x = tl.load(plain + (head * rows + row) * RANK + lane, mask=wide, other=0.0).to(tl.float32)
    a, b = _turned(turned + row * turned_row + head * turned_head, rope, half, turns, rows, DIM)
    there = queries + (row * HEADS + head) * (RANK + DIM)
    _store(there, lane, half, x * scale, a * scale, b * scale, wide, turns, RANK, DIM)


@triton.jit
def _latent_of(latent, norm, rope, keys, location, rows, eps, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
               DIM: tl.constexpr, HALF_PAD: tl.constexpr):  # fmt: skip
    lane, half = tl.arange(0, RANK_PAD), tl.arange(0, HALF_PAD)
    wide, turns = lane < RANK, half < DIM // 2
    x = tl.load(latent + lane, mask=wide, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps) * tl.load(norm + lane, mask=wide, other=0.0).to(tl.float32)
    a, b = _turned(latent + RANK, rope, half, turns, rows, DIM)
    there = keys + location * (RANK + DIM)
    x, a, b = number(x, keys), number(a, keys), number(b, keys)
    _store(there, lane, half, x, a, b, wide & (location >= 0), turns & (location >= 0), RANK, DIM)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["write"])
def _kernel(plain, turned, latents, norm, rope, write, queries, keys, rows, turned_row, turned_head, latent_row, scale,
            eps, HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, DIM: tl.constexpr,
            HALF_PAD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Grid (rows, blocks of heads + 1): the last program of a row takes its latent, the others its queries."""
    in_turn(EARLY)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rope += row * DIM
    if block * BLOCK < HEADS:
        _queries_of(plain, turned, rope, queries, row, rows, block, turned_row, turned_head, scale, HEADS, RANK,
                    RANK_PAD, DIM, HALF_PAD, BLOCK)  # fmt: skip
    else:
        _latent_of(latents + row * latent_row, norm, rope, keys, tl.load(write + row), rows, eps, RANK, RANK_PAD, DIM,
                   HALF_PAD)  # fmt: skip


def turn_and_write_latents(
    plain: Tensor,
    turned: Tensor,
    latents: Tensor,
    norm: Tensor,
    rope: Tensor,
    write: Tensor,
    keys: Tensor,
    *,
    scale: float,
    eps: float,
) -> Tensor:
    """Rotate queries and scale them; norm latents, rotate the part behind them, and write both to their locations.

    plain: queries in the latent space [heads, rows, rank], contiguous; turned: their rotary parts [rows, heads, dim],
    rows of a latent's rotary part likewise: latents [rows, rank + dim]; both with last strides of 1, and numbers 2i and
    2i+1 of a rotary part a pair. norm: [rank]; rope: cosines and signed sines of the rows, [2, rows, 1, dim],
    contiguous. write: int64 [rows], a negative one writes nothing; keys: [locations, 1, rank + dim], written to, finite
    numbers alone, pairs half of dim apart. Computed in float32. Returns queries [rows, heads, rank + dim] in plain's
    dtype.
    """
    (heads, rows, rank), dim = plain.shape, turned.shape[2]
    queries = plain.new_empty(rows, heads, rank + dim)
    block = min(_HEADS, triton.next_power_of_2(heads))
    _kernel[(rows, triton.cdiv(heads, block) + 1)](
        plain,
        turned,
        latents,
        norm,
        rope,
        write,
        queries,
        keys,
        rows,
        turned.stride(0),
        turned.stride(1),
        latents.stride(0),
        scale,
        eps,
        HEADS=heads,
        RANK=rank,
        RANK_PAD=triton.next_power_of_2(rank),
        DIM=dim,
        HALF_PAD=triton.next_power_of_2(dim // 2),
        BLOCK=block,
        **early(),
    )
    return queries


def turn_and_write_latents_reference(
    plain: Tensor,
    turned: Tensor,
    latents: Tensor,
    norm: Tensor,
    rope: Tensor,
    write: Tensor,
    keys: Tensor,
    *,
    scale: float,
    eps: float,
) -> Tensor:
    rank, cos, sin = plain.shape[2], *rope.float()

    def rotated(heads: Tensor) -> Tensor:
        halves = heads.float().unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return halves * cos + halves.roll(halves.shape[-1] // 2, -1) * sin

    normed = F.rms_norm(latents[:, :rank].float(), (rank,), norm.float(), eps)
    whole = torch.cat((normed[:, None], rotated(latents[:, None, rank:])), dim=-1)
    kept = write >= 0
    keys.index_copy_(0, write[kept], whole[kept].to(keys.dtype))
    return (scale * torch.cat((plain.float().transpose(0, 1), rotated(turned)), dim=-1)).to(plain.dtype)
