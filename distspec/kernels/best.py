"""The few best tokens of a row by their perturbed scores, and the share of these: what a drafter guesses.

Knows what kernels/sample.py knows. Does not know trees. Each program keeps the best of its block of tokens and the sum
of their exponentials; a second kernel merges these. sampling.best is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from distspec.kernels.launch import early, in_turn
from distspec.kernels.pieces import weighed
from distspec.kernels.sample import perturbed

MOST = 16
"""More are found faster by other means."""

_BLOCK = 2048


@triton.jit(do_not_specialize_on_alignment=["sums"])
def _block(logits, temperatures, keys, scores, tokens, tops, sums, vocab, row_stride, temperature_stride, key_stride,
           greedy_below, BLOCK: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    in_turn(EARLY)
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    score = perturbed(logits, temperatures, keys, tops, tops, row, block, vocab, row_stride, temperature_stride,
                      key_stride, greedy_below, False, BLOCK)  # fmt: skip
    at = row * tl.num_programs(0) + block
    top, weight = weighed(score)
    tl.store(tops + at, top)
    tl.store(sums + at, weight)
    place = tl.arange(0, BLOCK)
    for rank in range(MOST):
        best, where = tl.max(score, 0, return_indices=True)
        tl.store(scores + at * MOST + rank, best)
        tl.store(tokens + at * MOST + rank, block * BLOCK + where)
        score = tl.where(place == where, float("-inf"), score)


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["sums"])
def _merge(scores, tokens, tops, sums, out_tokens, out_scores, blocks, most, BLOCKS: tl.constexpr, MOST: tl.constexpr,
           ALL: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    in_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    block, place = tl.arange(0, BLOCKS), tl.arange(0, ALL)
    top = tl.load(tops + row * blocks + block, mask=block < blocks, other=float("-inf"))
    share = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0)
    highest = tl.max(top, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)  # of a row that allows nothing
    weight = tl.sum(share * tl.exp(top - highest), 0)
    total = highest + tl.log(tl.where(weight > 0, weight, 1.0))
    score = tl.load(scores + row * blocks * MOST + place, mask=place < blocks * MOST, other=float("-inf"))
    for rank in range(most):
        best, where = tl.max(score, 0, return_indices=True)
        tl.store(out_scores + row * most + rank, best - total)
        tl.store(out_tokens + row * most + rank, tl.load(tokens + row * blocks * MOST + where).to(tl.int64))
        score = tl.where(place == where, float("-inf"), score)


def best_whole(
    logits: Tensor, temperature: Tensor, keys: Tensor, greedy_below: float, most: int
) -> tuple[Tensor, Tensor]:
    """As sampling.best for rows that are truncated by nothing: the first token is what sample.draw_whole returns.

    Arguments as of sample.draw_whole; most <= min(MOST, vocab). Returns tokens int64 [rows, most], the best first, the
    lower one of equals; and float32 [rows, most], their logarithmic shares of the perturbed scores, -inf of tokens that
    are not allowed.
    """
    rows, vocab = logits.shape
    blocks, width = triton.cdiv(vocab, _BLOCK), triton.next_power_of_2(most)
    scores = logits.new_empty(rows, blocks, width)
    tops, sums = logits.new_empty(2, rows, blocks)
    tokens = torch.empty(rows, blocks, width, dtype=torch.int32, device=logits.device)
    out_tokens = torch.empty(rows, most, dtype=torch.int64, device=logits.device)
    out_scores = logits.new_empty(rows, most)
    _block[(blocks, rows)](
        logits,
        temperature,
        keys,
        scores,
        tokens,
        tops,
        sums,
        vocab,
        logits.stride(0),
        temperature.stride(0),
        keys.stride(0),
        greedy_below,
        BLOCK=_BLOCK,
        MOST=width,
        **early(),
        num_warps=4,
    )
    _merge[(rows,)](
        scores,
        tokens,
        tops,
        sums,
        out_tokens,
        out_scores,
        blocks,
        most,
        BLOCKS=triton.next_power_of_2(blocks),
        MOST=width,
        ALL=triton.next_power_of_2(blocks * width),
        **early(),
        num_warps=4,
    )
    return out_tokens, out_scores
