"""Masks, bias and penalties of some rows of logits, in place, each in one launch for all of them.

Knows logits, and the tables and rows of sampling/edits.py, which is the reference, to the bit: products are rounded
before they are subtracted. Does not know who asked. A mask only writes, and only where a token does not stay.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_WORD = tl.constexpr(32)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _mask(logits, rows, bits, words, vocab, row_stride, BLOCK: tl.constexpr):
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits + row * words + token // _WORD, mask=token < vocab, other=0)
    forbidden = ((word >> (token % _WORD)) & 1) == 0
    at = logits + tl.load(rows + row) * row_stride + token
    tl.store(at, tl.full([BLOCK], float("-inf"), tl.float32), mask=(token < vocab) & forbidden)


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["rows", "slots"])
def _bias(logits, rows, slots, tokens, values, most, row_stride, MOST: tl.constexpr):
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, MOST)
    entry = tl.load(slots + row) * most + place
    token = tl.load(tokens + entry, mask=place < most, other=-1)
    value = tl.load(values + entry, mask=place < most, other=0.0)
    at = logits + tl.load(rows + row) * row_stride + token
    tl.store(at, tl.load(at, mask=token >= 0, other=0.0) + value, mask=token >= 0)


@triton.jit(do_not_specialize=["depth"], do_not_specialize_on_alignment=["rows", "slots", "paths"])
def _penalize(logits, rows, slots, paths, penalties, seen, depth, vocab, row_stride, IN_PROMPT: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot = tl.load(slots + row)
    token = block * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(seen + slot * vocab + token, mask=token < vocab, other=0)
    for level in range(depth):
        count += (tl.load(paths + row * depth + level) == token).to(tl.int32)
    at = logits + tl.load(rows + row) * row_stride + token
    # What came up nowhere stays as it is, and most tokens did not: their logits are not even read.
    came = (token < vocab) & (count > 0)
    score = tl.load(at, mask=came, other=0.0)
    repetition = tl.load(penalties + slot * 3)
    score = tl.where(score > 0, tl.div_rn(score, tl.zeros_like(score) + repetition), score * repetition)
    output = count % IN_PROMPT
    score -= tl.load(penalties + slot * 3 + 2) * output.to(tl.float32)
    score -= tl.where(output > 0, tl.load(penalties + slot * 3 + 1), 0.0)
    tl.store(at, score, mask=came)


def mask_(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """As edits.Mask. logits: float32 [rows, vocab], each row contiguous, as below; rows: int64 [n], of these; bits:
    int32 [n, ceil(vocab / 32)], contiguous."""
    vocab = logits.shape[1]
    grid = triton.cdiv(vocab, _BLOCK), len(rows)
    _mask[grid](logits, rows, bits, bits.shape[1], vocab, logits.stride(0), BLOCK=_BLOCK, num_warps=4)


def add_bias_(logits: Tensor, rows: Tensor, slots: Tensor, tokens: Tensor, values: Tensor) -> None:
    """As edits.Bias. rows, slots: int64 [n]; tokens, values: int64 and float32 [slots, most], contiguous, -1 where
    there is none; a slot has a token once."""
    most = tokens.shape[1]
    width = triton.next_power_of_2(most)
    _bias[(len(rows),)](logits, rows, slots, tokens, values, most, logits.stride(0), MOST=width, num_warps=1)


def penalize_(
    logits: Tensor, rows: Tensor, slots: Tensor, paths: Tensor, penalties: Tensor, seen: Tensor, in_prompt: int
) -> None:
    """As edits.Penalties. rows, slots: int64 [n]; paths: int64 [n, depth]; penalties: float32 [slots, 3], repetition,
    presence, frequency; seen: int32 [slots, vocab], by how often a token came up in the output, and `in_prompt` more
    for tokens of the prompt. All contiguous but logits."""
    vocab = logits.shape[1]
    _penalize[(triton.cdiv(vocab, _BLOCK), len(rows))](
        logits,
        rows,
        slots,
        paths,
        penalties,
        seen,
        paths.shape[1],
        vocab,
        logits.stride(0),
        IN_PROMPT=in_prompt,
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,  # a fused multiply-add would round once
    )
