"""The small change of rounds that no host looks at: where rows stand, how they are drawn, and what was accepted.

Knows tensors by slot. Does not know models, attention or pages. What does the same in plain torch, and says what
everything means, is engine/rolling/ops.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from distspec.kernels.launch import early, in_turn
from distspec.kernels.splitmix import STEP, mixed


@triton.jit(do_not_specialize=["offset", "rows", "count", "spare_row"])
def _spread(lengths, keys, reals, slots, positions, integers, out, offset, rows, count, spare_row,
            COUNT: tl.constexpr, STEPWISE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    in_turn(EARLY)
    own, i = tl.program_id(0).to(tl.int64), tl.arange(0, COUNT)
    slot = tl.load(slots + own)
    at = tl.maximum(tl.load(lengths + slot) + offset + i, 0)
    at = tl.where(slot == spare_row, 0, at)
    place = i * rows + own if STEPWISE else own * count + i
    inside = i < count
    tl.store(positions + place, at, mask=inside)
    tl.store(integers + place * 4 + 3, at + 1, mask=inside)
    for column in tl.static_range(3):
        tl.store(integers + place * 4 + column, tl.load(keys + slot * 3 + column), mask=inside)
        tl.store(out + place * 3 + column, tl.load(reals + slot * 3 + column), mask=inside)


def spread(
    lengths: Tensor, keys: Tensor, reals: Tensor, slots: Tensor, offset: int, count: int, stepwise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As ops.spread, on a GPU. lengths: int64 [slots + 1]; keys: int64 [slots + 1, 3]; reals: float32 [slots + 1, 3];
    slots: int64 [n]; all contiguous. Returns positions int64 [n * count], integers int64 [n * count, 4] and reals
    float32 [n * count, 3], as of ops.Spread."""
    rows = len(slots)
    positions, integers = lengths.new_empty(rows * count), lengths.new_empty(rows * count, 4)
    out = reals.new_empty(rows * count, 3)
    _spread[(rows,)](
        lengths,
        keys,
        reals,
        slots,
        positions,
        integers,
        out,
        offset,
        rows,
        count,
        len(lengths) - 1,
        COUNT=triton.next_power_of_2(count),
        STEPWISE=stepwise,
        **early(),
        num_warps=1,
    )
    return positions, integers, out


@triton.jit(do_not_specialize=["count", "spare_row"])
def _settle(lengths, last, slots, chain, outcomes, results, count, spare_row, COUNT: tl.constexpr,
            EARLY: tl.constexpr):  # fmt: skip
    in_turn(EARLY)
    own, i = tl.program_id(0).to(tl.int64), tl.arange(0, COUNT)
    slot = tl.load(slots + own)
    outcome = tl.load(outcomes + own * count + i, mask=i < count, other=-1)
    draft = tl.load(chain + own * count + 1 + i, mask=i + 1 < count, other=-2)
    accepted = tl.min(tl.where(draft == outcome, COUNT, i), 0)
    tl.store(results + own * (count + 1), accepted.to(tl.int64))
    tl.store(results + own * (count + 1) + 1 + i, outcome, mask=i < count)
    tl.store(lengths + slot, tl.where(slot == spare_row, 0, tl.load(lengths + slot) + accepted + 1))
    tl.store(last + slot * 2, tl.load(chain + own * count + accepted))
    tl.store(last + slot * 2 + 1, tl.load(outcomes + own * count + accepted))


def settle(lengths: Tensor, last: Tensor, slots: Tensor, chain: Tensor, outcomes: Tensor) -> Tensor:
    """As ops.settle, on a GPU. lengths: int64 [slots + 1] and last: int64 [slots + 1, 2] are written to; slots: int64
    [n]; chain, outcomes: int64 [n, count]; all contiguous. Returns int64 [n, count + 1]: how many were accepted, then
    the outcomes."""
    rows, count = chain.shape
    results = chain.new_empty(rows, count + 1)
    _settle[(rows,)](
        lengths,
        last,
        slots,
        chain,
        outcomes,
        results,
        count,
        len(lengths) - 1,
        COUNT=triton.next_power_of_2(count),
        **early(),
        num_warps=1,
    )
    return results


@triton.jit
def _mix(state, part):
    """One more number into 64 bits: distspec.synthetic."""
    return mixed(state + part.to(tl.uint64) + STEP)


@triton.jit(do_not_specialize=["rows"])
def _make_up(integers, tokens, out, rows, vocab, row_stride, token_stride, LEAST: tl.constexpr, GUESS: tl.constexpr,
             BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    in_turn(EARLY)
    own = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = own < rows
    key = _mix(tl.zeros([BLOCK], tl.uint64), tl.load(integers + own * row_stride + 1, mask=inside, other=0))
    for column in tl.static_range(2, 4):
        key = _mix(key, tl.load(integers + own * row_stride + column, mask=inside, other=0))
    key = _mix(key, tl.load(tokens + own * token_stride, mask=inside, other=0))
    one = tl.full([BLOCK], 1, tl.uint64)
    size = one * vocab
    right = _mix(key, one) % size
    if GUESS:
        wrong = (right + 1 + _mix(key, one * 3) % (size - 1)) % size
        right = tl.where(_mix(key, one * 2) < LEAST, right, wrong)
    tl.store(out + own, right.to(tl.int64), mask=inside)


def make_up(integers: Tensor, tokens: Tensor, vocab: int, least: int | None) -> Tensor:
    """As ops.make_up, on a GPU. integers: int64 [rows, 4]; tokens: int64 [rows]; least: hashes of 64 bits from here on
    are wrong guesses; None: outcomes. Returns int64 [rows], in 0 .. vocab-1."""
    rows, block = len(tokens), 32
    out = tokens.new_empty(rows)
    _make_up[(triton.cdiv(rows, block),)](
        integers,
        tokens,
        out,
        rows,
        vocab,
        integers.stride(0),
        tokens.stride(0),
        LEAST=least or 0,
        GUESS=least is not None,
        BLOCK=block,
        **early(),
        num_warps=1,
    )
    return out
