"""Residual addition and root-mean-square norm of rows in one pass.

Knows rows of a residual stream. Does not know layers, or what is added.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from distspec.kernels.launch import early, in_turn


@triton.jit
def _kernel(x, delta, weight, total, out, width, eps, ADD: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    at = tl.arange(0, WIDTH)
    inside = at < width
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    in_turn(EARLY)
    here = tl.program_id(0).to(tl.int64) * width + at
    value = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        # The norm is that of the stream as it is kept, so it sees the rounded sum.
        rounded = (value + tl.load(delta + here, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + here, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(out + here, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: [rows, width], contiguous; weight: [width]. Returns the normed rows, computed in float32, in x's dtype."""
    out = torch.empty_like(x)
    _launch(x, None, weight, x, out, eps)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The stream x + delta and its norm.

    x, delta: [rows, width], contiguous; weight: [width]. Returns both as [rows, width] in x's dtype; the norm is
    computed in float32 from the sum as rounded.
    """
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch(x, delta, weight, total, out, eps)
    return total, out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm_reference(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, rms_norm_reference(total, weight, eps)


def _launch(x: Tensor, delta: Tensor | None, weight: Tensor, total: Tensor, out: Tensor, eps: float) -> None:
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    warps = min(16, max(1, block // 512))
    add = delta is not None
    sizes = {"ADD": add, "WIDTH": block}
    _kernel[(rows,)](x, delta if add else x, weight, total, out, width, eps, **sizes, **early(), num_warps=warps)
