"""What becomes of the sums of a product before they are stored, and of what they are scaled by.

Knows one tile of sums, in registers. Does not know how they came about.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finish(y, up, mean, bias, residual, gain, out, scaled, parts, row, outs, rows, eps, outputs, NORM: tl.constexpr,
           BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, PREPARE: tl.constexpr):  # fmt: skip
    """From sums of products, float32 [M, N] (and mean squares of the inputs, [M]), to what is stored."""
    if NORM:
        scale = tl.rsqrt(mean + eps)[:, None]
        y *= scale
        up *= scale
    inside = (row < rows)[:, None] & (outs < outputs)[None, :]
    if BIAS:
        y += tl.load(bias + outs, mask=outs < outputs, other=0.0).to(tl.float32)[None, :]
    if GATED:
        y = y * tl.sigmoid(y) * up
    at = row.to(tl.int64)[:, None] * outputs + outs[None, :]
    if ADD:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    rounded = y.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    if PREPARE:
        kept = tl.where(inside, rounded.to(tl.float32), 0.0)
        weight = tl.load(gain + outs, mask=outs < outputs, other=0.0).to(tl.float32)[None, :]
        tl.store(scaled + at, (kept * weight).to(scaled.dtype.element_ty), mask=inside)
        tl.store(parts + tl.program_id(0) * rows + row, tl.sum(kept * kept, 1), mask=row < rows)


@triton.jit
def mean_square(squares, row, rows, inputs, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr):
    """[M]: of the squares whose parts are given."""
    part = tl.arange(0, PARTS_PAD)
    inside = (part < PARTS)[:, None] & (row < rows)[None, :]
    return tl.sum(tl.load(squares + part[:, None] * rows + row[None, :], mask=inside, other=0.0), 0) / inputs
