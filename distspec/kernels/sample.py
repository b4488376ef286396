"""The draw of a token per row over the whole vocabulary, with noise that is made where it is added.

Knows logits, temperatures and the keys of the noise. Does not know why a token may not stay, requests or models. The
noise is that of sampling/noise.py, to the bit before its logarithms: SplitMix64 by counter, from which sampling/draw.py
makes a table [rows, vocab] in memory. Each program scores a block of tokens and keeps its best; a second kernel takes
the best of these. Gumbel-max as in draw.py, which is the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from distspec.kernels.launch import early, in_turn
from distspec.kernels.splitmix import STEP, mixed
from distspec.kernels.truncate import Kept, scaled

_BLOCK = 2048
_FINEST = tl.constexpr(2.0**-32)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def _key(keys, row, stride):
    """uint64: of the noise of a row, from its seed, choice and position."""
    at = keys + row * stride
    key = mixed(tl.load(at).to(tl.uint64, bitcast=True) + STEP)
    key = mixed((key ^ tl.load(at + 1).to(tl.uint64, bitcast=True)) * STEP + 1)
    return mixed((key ^ tl.load(at + 2).to(tl.uint64, bitcast=True)) * STEP + 1)


@triton.jit
def _gumbel(half):
    """-log(-log(1 - u)) where u is made of 32 bits, given as uint64."""
    u = tl.minimum((half.to(tl.uint32).to(tl.float32) + 0.5) * _FINEST, _BELOW_ONE)
    # A small u decides draws and needs its digits: 2 atanh(z) is log(1 - u) with z = u / (2 - u), negated.
    z = u / (2.0 - u)
    s = z * z
    series = 2.0 * z * (1.0 + s * (1.0 / 3 + s * (1.0 / 5 + s * (1.0 / 7 + s * (1.0 / 9)))))
    return -tl.log(tl.where(u < 0.25, series, -tl.log(1.0 - u)))


@triton.jit
def gumbel_of(keys, row, stride, token):
    """The noise of some tokens of a row, wherever they lie; what `perturbed` adds to those of a block."""
    word = mixed(_key(keys, row, stride) + (token // 2 + 1).to(tl.uint64) * STEP)
    return _gumbel(tl.where(token % 2 == 0, word & 0xFFFFFFFF, word >> 32))


@triton.jit
def perturbed(logits, temperatures, keys, tops, depths, row, block, vocab, row_stride, temperature_stride, key_stride,
              greedy_below, LIMITED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """float32 [BLOCK]: logits / temperature + G of a block of tokens, logits of a greedy row, -inf past the end; also
    where a LIMITED row lets a token not stay."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    score = scaled(logits, temperatures, row, token, vocab, row_stride, temperature_stride, greedy_below)
    if LIMITED:
        score = tl.where(tl.load(tops + row) - score <= tl.load(depths + row), score, float("-inf"))
    if tl.load(temperatures + row * temperature_stride) >= greedy_below:
        # Two tokens share a word of the generator, whose first output has counter 1.
        counter = (block * (BLOCK // 2) + tl.arange(0, BLOCK // 2) + 1).to(tl.uint64)
        word = mixed(_key(keys, row, key_stride) + counter * STEP)
        score += tl.interleave(_gumbel(word & 0xFFFFFFFF), _gumbel(word >> 32))
    return score


@triton.jit
def _score(logits, temperatures, keys, tops, depths, scores, tokens, vocab, row_stride, temperature_stride, key_stride,
           greedy_below, LIMITED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """The best token of a block, and its score."""
    in_turn(EARLY)
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    score = perturbed(logits, temperatures, keys, tops, depths, row, block, vocab, row_stride, temperature_stride,
                      key_stride, greedy_below, LIMITED, BLOCK)  # fmt: skip
    best, where = tl.max(score, 0, return_indices=True)
    tl.store(scores + row * tl.num_programs(0) + block, best)
    tl.store(tokens + row * tl.num_programs(0) + block, block * BLOCK + where)


@triton.jit
def _choose(scores, tokens, out, blocks, BLOCKS: tl.constexpr, EARLY: tl.constexpr):
    in_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    score = tl.load(scores + row * blocks + block, mask=block < blocks, other=float("-inf"))
    _, where = tl.max(score, 0, return_indices=True)
    tl.store(out + row, tl.load(tokens + row * blocks + where).to(tl.int64))


def draw_whole(
    logits: Tensor, temperature: Tensor, keys: Tensor, greedy_below: float, stays: Kept | None = None
) -> Tensor:
    """The token of each row: argmax of logits / temperature + G over what stays of it, greedy without noise.

    logits: float32 [rows, vocab], rows contiguous; temperature: float32 [rows], rows under greedy_below are greedy;
    keys: int64 [rows, 3], seed, choice and position, each row contiguous; stays: everything by default. Returns int64
    [rows]: what sampling.draw returns, up to scores that differ by rounding of the logarithms, less than 1e-5.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    scores = logits.new_empty(rows, blocks)
    tokens = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _score[(blocks, rows)](
        logits,
        temperature,
        keys,
        stays.top if stays else scores,
        stays.depth if stays else scores,
        scores,
        tokens,
        vocab,
        logits.stride(0),
        temperature.stride(0),
        keys.stride(0),
        greedy_below,
        LIMITED=stays is not None,
        BLOCK=_BLOCK,
        **early(),
        num_warps=4,
    )
    padded = triton.next_power_of_2(blocks)
    _choose[(rows,)](scores, tokens, out, blocks, BLOCKS=padded, **early(), num_warps=1)
    return out
