"""Logprobs of one token per row, its rank, and the likeliest tokens, in one pass over the vocabulary.

Knows scores and tokens. Does not know what the scores are, or who asked. The first kernel reads each block once: its
mass, how many of its tokens are likelier, and the best of each piece. The likeliest tokens lie in as many pieces as
there are of them, which the second kernel looks at again. sampling/logprobs.py is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from distspec.kernels.pieces import in_best_pieces, weighed

MOST = 32
"""More are found faster by other means."""

_BLOCK = 2048
_PIECE = 128


@triton.jit(do_not_specialize_on_alignment=["sums"])
def _survey(scores, tokens, tops, sums, likelier, bests, vocab, row_stride, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(scores + row * row_stride + tl.load(tokens + row))
    score = tl.load(scores + row * row_stride + token, mask=token < vocab, other=float("-inf"))
    at = row * tl.num_programs(0) + block
    top, weight = weighed(score)
    tl.store(tops + at, top)
    tl.store(sums + at, weight)
    tl.store(likelier + at, tl.sum((score > own).to(tl.int32), 0))
    count: tl.constexpr = BLOCK // PIECE
    tl.store(bests + at * count + tl.arange(0, count), tl.max(tl.reshape(score, [count, PIECE]), 1))


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["sums"])
def _tell(scores, tokens, tops, sums, likelier, bests, integers, reals, most, blocks, pieces, vocab, row_stride,
          BLOCKS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    top = tl.load(tops + row * blocks + block, mask=inside, other=float("-inf"))
    highest = tl.max(top, 0)
    weight = tl.load(sums + row * blocks + block, mask=inside, other=0.0) * tl.exp(top - highest)
    mass = highest + tl.log(tl.sum(weight, 0))
    out = row * (most + 1)
    own = tl.load(scores + row * row_stride + tl.load(tokens + row))
    tl.store(integers + out, 1 + tl.sum(tl.load(likelier + row * blocks + block, mask=inside, other=0), 0).to(tl.int64))
    tl.store(reals + out, own - mass)
    token = in_best_pieces(bests, row, pieces, most, PIECES, PIECE, COUNT)
    score = tl.load(scores + row * row_stride + token, mask=token < vocab, other=float("-inf"))
    at = tl.arange(0, COUNT * PIECE)
    for i in range(most):
        found, where = tl.max(score, 0, return_indices=True)
        is_it = at == where
        tl.store(integers + out + 1 + i, tl.sum(tl.where(is_it, token, 0), 0).to(tl.int64))
        tl.store(reals + out + 1 + i, found - mass)
        score = tl.where(is_it, float("-inf"), score)


def tell_whole(scores: Tensor, tokens: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """scores: float32 [rows, vocab], rows contiguous, log p up to a constant per row, not all -inf; tokens: int64
    [rows]; most <= min(MOST, vocab). Returns int64 [rows, 1 + most] and float32 [rows, 1 + most], see logprobs.Told: a
    place that no token takes has -inf.
    """
    rows, vocab = scores.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    pieces = blocks * (_BLOCK // _PIECE)
    tops, sums = scores.new_empty(2, rows, blocks)
    likelier = torch.empty(rows, blocks, dtype=torch.int32, device=scores.device)
    bests = scores.new_empty(rows, pieces)
    integers = torch.empty(rows, 1 + most, dtype=torch.int64, device=scores.device)
    reals = scores.new_empty(rows, 1 + most)
    found = scores, tokens, tops, sums, likelier, bests
    _survey[(blocks, rows)](*found, vocab, scores.stride(0), BLOCK=_BLOCK, PIECE=_PIECE, num_warps=4)
    _tell[(rows,)](
        *found,
        integers,
        reals,
        most,
        blocks,
        pieces,
        vocab,
        scores.stride(0),
        BLOCKS=triton.next_power_of_2(blocks),
        PIECES=triton.next_power_of_2(pieces),
        PIECE=_PIECE,
        COUNT=triton.next_power_of_2(max(1, most)),
        num_warps=8,
    )
    return integers, reals
