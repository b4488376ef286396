"""The draw from a nucleus, without finding its edge: who would win is asked first, and then whether it may.

Knows what kernels/sample.py and truncate.py know. The edge of a nucleus costs many passes over the vocabulary, but
whether one token lies within it only needs the mass above that token. So the CANDIDATES best tokens by their perturbed
scores are found (they draw from p without replacement, see Kool et al., arXiv 1903.06059), one pass measures the mass
above each, and the first that lies within the nucleus is what Gumbel-max over the nucleus draws. Each candidate lies
outside with a probability of at most 1 - top_p, given those before it; so that all do is as good as impossible where
top_p is large enough for `suits`. If it does happen, the best token is drawn, which always may.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from distspec.kernels.pieces import in_best_pieces, weighed
from distspec.kernels.sample import gumbel_of, perturbed
from distspec.kernels.truncate import LARGEST, scaled

CANDIDATES = 16
_LEAST = 0.8
"""0.2 ** CANDIDATES is less than 1e-11."""

_BLOCK = 2048
_PIECE = 256


def suits(top_p: float) -> bool:
    """Whether candidates are enough for rows with top_p as small as this."""
    return top_p >= _LEAST


@triton.jit(do_not_specialize_on_alignment=["sums"])
def _weigh(logits, temperatures, tops, sums, vocab, row_stride, temperature_stride, greedy_below, BLOCK: tl.constexpr):
    """The best of each block, and what its tokens weigh beside it."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = scaled(logits, temperatures, row, token, vocab, row_stride, temperature_stride, greedy_below)
    at = row * tl.num_programs(0) + block
    top, weight = weighed(score)
    tl.store(tops + at, tl.maximum(top, -LARGEST))
    tl.store(sums + at, weight)


@triton.jit
def _pieces(logits, temperatures, keys, tops, depths, bests, vocab, row_stride, temperature_stride, key_stride,
            greedy_below, BLOCK: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """The best perturbed score of each piece."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    score = perturbed(logits, temperatures, keys, tops, depths, row, block, vocab, row_stride, temperature_stride,
                      key_stride, greedy_below, True, BLOCK)  # fmt: skip
    count: tl.constexpr = BLOCK // PIECE
    best = tl.max(tl.reshape(score, [count, PIECE]), 1)
    tl.store(bests + (row * tl.num_programs(0) + block) * count + tl.arange(0, count), best)


@triton.jit
def _candidates(logits, temperatures, keys, tops, depths, bests, tokens, token_depths, pieces, vocab, row_stride,
                temperature_stride, key_stride, greedy_below, PIECES: tl.constexpr, PIECE: tl.constexpr,
                COUNT: tl.constexpr):  # fmt: skip
    """The best tokens of a row, from its best pieces. A place that no token takes is -1."""
    row = tl.program_id(0).to(tl.int64)
    token = in_best_pieces(bests, row, pieces, COUNT, PIECES, PIECE, COUNT)
    depth = tl.load(tops + row) - scaled(
        logits, temperatures, row, token, vocab, row_stride, temperature_stride, greedy_below
    )
    score = tl.where(depth <= tl.load(depths + row), -depth, float("-inf"))
    if tl.load(temperatures + row * temperature_stride) >= greedy_below:
        score += gumbel_of(keys, row, key_stride, token)
    at = tl.arange(0, COUNT * PIECE)
    for i in range(COUNT):
        highest, where = tl.max(score, 0, return_indices=True)
        is_it = at == where
        found = highest > float("-inf")
        tl.store(tokens + row * COUNT + i, tl.where(found, tl.sum(tl.where(is_it, token, 0), 0), -1))
        tl.store(token_depths + row * COUNT + i, tl.sum(tl.where(is_it, tl.where(found, depth, 0.0), 0.0), 0))
        score = tl.where(is_it, float("-inf"), score)


@triton.jit
def _above(logits, temperatures, tops, token_depths, parts, vocab, row_stride, temperature_stride, greedy_below,
           COUNT: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """What of a block is likelier than each candidate, as exp(-depth)."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    place, top = tl.arange(0, COUNT), tl.load(tops + row)
    edge = tl.load(token_depths + row * COUNT + place)
    acc = tl.zeros([PIECE, COUNT], tl.float32)
    for start in range(0, BLOCK, PIECE):
        token = block * BLOCK + start + tl.arange(0, PIECE)
        depth = top - scaled(logits, temperatures, row, token, vocab, row_stride, temperature_stride, greedy_below)
        weight = tl.exp(-depth)
        acc += tl.where(depth[:, None] < edge[None, :], weight[:, None], 0.0)
    tl.store(parts + (row * tl.num_programs(0) + block) * COUNT + place, tl.sum(acc, 0))


@triton.jit(do_not_specialize_on_alignment=["sums"])
def _choose(tops, block_tops, sums, parts, tokens, token_depths, top_p, out, blocks, top_p_stride,
            COUNT: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """The first candidate within the nucleus; without any, the one that is nearest to the best token."""
    row = tl.program_id(0).to(tl.int64)
    block, place = tl.arange(0, BLOCKS), tl.arange(0, COUNT)
    best = tl.load(block_tops + row * blocks + block, mask=block < blocks, other=float("-inf"))
    weight = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0)
    total = tl.sum(weight * tl.exp(best - tl.load(tops + row)), 0)
    at = parts + (row * blocks + block)[:, None] * COUNT + place[None, :]
    above = tl.sum(tl.load(at, mask=(block < blocks)[:, None], other=0.0), 0)
    token, depth = tl.load(tokens + row * COUNT + place), tl.load(token_depths + row * COUNT + place)
    share = tl.load(top_p + row * top_p_stride)
    enough = tl.where(share < 1, share * total, float("inf"))
    may = (token >= 0) & ((depth <= 0) | (above < enough))
    first = tl.min(tl.where(may, place, COUNT), 0)
    _, nearest = tl.min(tl.where(token >= 0, depth, float("inf")), 0, return_indices=True)
    where = tl.where(first < COUNT, first, nearest)
    chosen = tl.maximum(tl.sum(tl.where(place == where, token, 0), 0), 0)  # of a row that allows nothing
    tl.store(out + row, chosen.to(tl.int64))


def draw_nucleus(
    logits: Tensor, temperature: Tensor, keys: Tensor, top_p: Tensor, min_p: Tensor, greedy_below: float
) -> Tensor:
    """As sample.draw_whole from what top_p, then min_p let stay. See `suits`.

    logits, temperature, keys: as there. top_p, min_p: float32 [rows], 1 and 0 where they are off. Returns int64 [rows].
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    pieces = blocks * (_BLOCK // _PIECE)
    block_tops, sums = logits.new_empty(2, rows, blocks)
    scale = vocab, logits.stride(0), temperature.stride(0)
    grid = blocks, rows
    _weigh[grid](logits, temperature, block_tops, sums, *scale, greedy_below, BLOCK=_BLOCK, num_warps=4)
    tops, depths = block_tops.amax(dim=1), min_p.log().neg_()
    noise = logits, temperature, keys, tops, depths
    bests = logits.new_empty(rows, pieces)
    _pieces[grid](*noise, bests, *scale, keys.stride(0), greedy_below, BLOCK=_BLOCK, PIECE=_PIECE, num_warps=4)
    tokens = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=logits.device)
    token_depths = logits.new_empty(rows, CANDIDATES)
    _candidates[(rows,)](
        *noise,
        bests,
        tokens,
        token_depths,
        pieces,
        *scale,
        keys.stride(0),
        greedy_below,
        PIECES=triton.next_power_of_2(pieces),
        PIECE=_PIECE,
        COUNT=CANDIDATES,
        num_warps=8,
    )
    parts = logits.new_empty(rows, blocks, CANDIDATES)
    sizes = {"COUNT": CANDIDATES, "BLOCK": _BLOCK, "PIECE": _PIECE}
    _above[grid](logits, temperature, tops, token_depths, parts, *scale, greedy_below, **sizes, num_warps=4)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _choose[(rows,)](
        tops,
        block_tops,
        sums,
        parts,
        tokens,
        token_depths,
        top_p,
        out,
        blocks,
        top_p.stride(0),
        COUNT=CANDIDATES,
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=4,
    )
    return out
