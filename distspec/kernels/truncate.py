"""How far below a row's best token the last one lies that top-k, top-p and min-p let stay.

Knows scaled logits and the limits of rows. Does not know the draw. No sort and no table of sorted tokens: both top-k
and top-p ask for the least depth within which lies enough, as a count or as a probability, and that is searched for in
all rows at once. A pass measures THRESHOLDS depths over the vocabulary, and the next one goes on between the two where
enough is reached; the same idea, by pivots, is in FlashInfer's sorting-free sampling. Depths beyond DEEPEST are not
looked at: the noise of a draw never lifts such a token above the best one (sampling/noise.py). sampling.process is the
reference, up to tokens whose scaled logits differ from the last one's by less than 2e-6, and to those at the edge of a
nucleus that weigh, but for the last of them, less than two millionths together: masses are summed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

DEEPEST = 32.0
"""Gumbel noise lies between -2.9 and 22.9."""

_PASSES = 5
_THRESHOLDS = tl.constexpr(32)
_DEEPEST = tl.constexpr(DEEPEST)
LARGEST = tl.constexpr(3e38)
"""Of what is compared. The best of tokens that may none of them stay is this below 0, so that all lie infinitely deep
below it."""
_ABOVE = tl.constexpr(-1e-3)
"""A depth where nothing is."""
_BLOCK = 2048
_PIECE = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """Of each row, on the device: top_k int64 [rows], 0 where it is off; top_p, min_p float32 [rows], 1 and 0 where
    they are; strided views are welcome. any_top_k, any_top_p: known on the host, to launch no search in vain."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    any_top_k: bool
    any_top_p: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens stay whose scaled logits are at most `depth` below `top`. float32 [rows] each; top: the row's best."""

    top: Tensor
    depth: Tensor


@triton.jit
def scaled(logits, temperatures, row, token, vocab, row_stride, temperature_stride, greedy_below):
    """logits / temperature of some tokens, logits of a greedy row, -inf past the end.

    Finite or -inf, as comparisons want it, whatever a model that overflows says: where one of two scores is no number,
    the better one may be what fills up a block, and its number no token's.
    """
    score = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf"))
    temperature = tl.load(temperatures + row * temperature_stride)
    divisor = tl.where(temperature >= greedy_below, temperature, 1.0)
    score = tl.div_rn(score, tl.zeros_like(score) + divisor)
    # Asked first: of a number and none, a compiled minimum is the number.
    return tl.where(score == score, tl.minimum(score, LARGEST), float("-inf"))


@triton.jit
def _tops(logits, temperatures, tops, vocab, row_stride, temperature_stride, greedy_below, BLOCK: tl.constexpr):
    """The best of each block."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = scaled(logits, temperatures, row, token, vocab, row_stride, temperature_stride, greedy_below)
    tl.store(tops + row * tl.num_programs(0) + block, tl.maximum(tl.max(score, 0), -LARGEST))


@triton.jit
def _top(tops, row, blocks, BLOCKS: tl.constexpr):
    block = tl.arange(0, BLOCKS)
    return tl.max(tl.load(tops + row * blocks + block, mask=block < blocks, other=float("-inf")), 0)


@triton.jit
def _advance(state, parts, want, row, blocks, COUNT: tl.constexpr, FIRST: tl.constexpr, BLOCKS: tl.constexpr):
    """After a pass: between which two depths enough is reached, and how much there is in all."""
    low, high = tl.load(state + row * 3), tl.load(state + row * 3 + 1)
    block, threshold = tl.arange(0, BLOCKS), tl.arange(0, _THRESHOLDS)
    at = parts + (row * blocks + block)[:, None] * _THRESHOLDS + threshold[None, :]
    measure = tl.sum(tl.load(at, mask=(block < blocks)[:, None], other=0.0), 0)
    total = tl.max(measure, 0) if FIRST else tl.load(state + row * 3 + 2)
    enough = want if COUNT else want * total
    last: tl.constexpr = _THRESHOLDS - 1
    found = tl.min(tl.where(measure >= enough, threshold, last), 0)
    step = (high - low) / _THRESHOLDS
    return low + step * found, tl.where(found == last, high, low + step * (found + 1)), total


@triton.jit(do_not_specialize_on_alignment=["state", "new_state"])
def _pass(logits, temperatures, tops, wants, depths, state, parts, new_state, new_parts, vocab, row_stride,
          temperature_stride, want_stride, greedy_below, PASS: tl.constexpr, COUNT: tl.constexpr, BLOCKS: tl.constexpr,
          BLOCK: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """How much lies within each of some depths, in a block of tokens: their number, or their exp(-depth). depths: where
    an earlier search has ended, beyond which there is nothing."""
    row, block, blocks = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    want = tl.load(wants + row * want_stride).to(tl.float32)
    if PASS == 0:
        low, high, total = _ABOVE, _DEEPEST, 0.0
    else:
        low, high, total = _advance(state, parts, want, row, blocks, COUNT, PASS == 1, BLOCKS)
    if block == 0:
        tl.store(new_state + row * 3, low)
        tl.store(new_state + row * 3 + 1, high)
        tl.store(new_state + row * 3 + 2, total)
    threshold = tl.arange(0, _THRESHOLDS)
    edge = low + (high - low) / _THRESHOLDS * (threshold + 1)
    top, deepest = _top(tops, row, blocks, BLOCKS), tl.load(depths + row)
    acc = tl.zeros([PIECE, _THRESHOLDS], tl.float32)
    for start in range(0, BLOCK, PIECE):
        token = block * BLOCK + start + tl.arange(0, PIECE)
        score = scaled(logits, temperatures, row, token, vocab, row_stride, temperature_stride, greedy_below)
        depth = top - score
        weight = tl.where(depth <= deepest, 1.0 if COUNT else tl.exp(-depth), 0.0)
        acc += tl.where(depth[:, None] <= edge[None, :], weight[:, None], 0.0)
    tl.store(new_parts + (row * blocks + block) * _THRESHOLDS + threshold, tl.sum(acc, 0))


@triton.jit(do_not_specialize_on_alignment=["state"])
def _settle(wants, depths, state, parts, want_stride, blocks, COUNT: tl.constexpr, BLOCKS: tl.constexpr):
    """A row's depth after the last pass, where its limit is on."""
    row = tl.program_id(0).to(tl.int64)
    want = tl.load(wants + row * want_stride).to(tl.float32)
    _, high, _ = _advance(state, parts, want, row, blocks, COUNT, False, BLOCKS)
    on = (want > 0) if COUNT else (want < 1)
    tl.store(depths + row, tl.where(on & (high < _DEEPEST), high, tl.load(depths + row)))


def kept(logits: Tensor, temperature: Tensor, limits: Limits, greedy_below: float) -> Kept:
    """What stays of each row under its limits: top_k, then top_p of the mass that is left, then min_p.

    logits: float32 [rows, vocab], rows contiguous; temperature: float32 [rows], rows under greedy_below are not scaled.
    The best token and those that equal the last one always stay.
    """
    rows, vocab = logits.shape
    block = min(_BLOCK, max(_PIECE, triton.next_power_of_2(vocab)))
    blocks = triton.cdiv(vocab, block)
    tops = logits.new_empty(rows, blocks)
    scale = (vocab, logits.stride(0), temperature.stride(0))
    _tops[(blocks, rows)](logits, temperature, tops, *scale, greedy_below, BLOCK=block, num_warps=4)
    depth = logits.new_full((rows,), torch.inf)
    if limits.any_top_k:
        _search(logits, temperature, tops, limits.top_k, depth, greedy_below, block, count=True)
    if limits.any_top_p:
        _search(logits, temperature, tops, limits.top_p, depth, greedy_below, block, count=False)
    return Kept(tops.amax(dim=1), torch.minimum(depth, limits.min_p.log().neg_()))


def _search(
    logits: Tensor,
    temperature: Tensor,
    tops: Tensor,
    wants: Tensor,
    depth: Tensor,
    greedy_below: float,
    block: int,
    *,
    count: bool,
) -> None:
    """Shorten `depth` [rows] to where `wants` lies within it: a count of tokens, or a share of what they weigh. block:
    of tokens, as for `tops` [rows, blocks]."""
    rows, blocks = tops.shape
    padded = triton.next_power_of_2(blocks)
    states = logits.new_empty(_PASSES, rows, 3)
    parts = logits.new_empty(_PASSES, rows, blocks, _THRESHOLDS.value)
    for i in range(_PASSES):
        _pass[(blocks, rows)](
            logits,
            temperature,
            tops,
            wants,
            depth,
            states[max(0, i - 1)],
            parts[max(0, i - 1)],
            states[i],
            parts[i],
            logits.shape[1],
            logits.stride(0),
            temperature.stride(0),
            wants.stride(0),
            greedy_below,
            PASS=min(i, 2),
            COUNT=count,
            BLOCKS=padded,
            BLOCK=block,
            PIECE=_PIECE,
            num_warps=4,
        )
    _settle[(rows,)](wants, depth, states[-1], parts[-1], wants.stride(0), blocks, COUNT=count, BLOCKS=padded)
