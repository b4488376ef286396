"""Products of a few rows with a weight matrix, with what comes before and after them in the same kernel.

Knows rows, matrices and tiles. Does not know models. At a handful of rows such a product is the reading of its matrix,
and a step is bound by the number of kernels: so the norm of the input is a scale (its weight multiplies the input, the
root of the sum of squares, found on the way, the result), and SiLU x up or the residual is added before the result
leaves the registers. One row is multiplied elementwise, each program having whole weight rows in its registers; more
go through the matrix units, padded, where the warps of a program may share K among them (`split`), which keeps more
reads in flight where a matrix has few rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from distspec.kernels.norm import rms_norm_reference
from distspec.kernels.tiles import Tile


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm of what is multiplied. weight: [inputs]."""

    weight: Tensor
    eps: float


@triton.jit
def _load_weights(weight, outs, ins, outputs, inputs, EVEN: tl.constexpr):
    """A tile of weights in the shape that `outs` and `ins` broadcast to."""
    at = weight + outs.to(tl.int64) * inputs + ins
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(outs < outputs) & (ins < inputs), other=0.0)


@triton.jit
def _load_inputs(x, gain, row, ins, rows, inputs, NORM: tl.constexpr, EVEN: tl.constexpr):
    """Inputs times the norm's weight, and their squares' terms, float32, in the shape that `row` and `ins` make."""
    inside = row < rows
    if not EVEN:
        inside = inside & (ins < inputs)
    value = tl.load(x + row.to(tl.int64) * inputs + ins, mask=inside, other=0.0).to(tl.float32)
    square = value * value
    if NORM:
        if EVEN:
            value *= tl.load(gain + ins).to(tl.float32)
        else:
            value *= tl.load(gain + ins, mask=ins < inputs, other=0.0).to(tl.float32)
    return value, square


@triton.jit
def _finish(y, up, squares, bias, residual, out, row, outs, rows, outputs, inputs, eps,
            NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """From sums of products, float32 [M, N] (and [M] sums of squares), to what is stored."""
    if NORM:
        scale = tl.rsqrt(squares / inputs + eps)[:, None]
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
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _one_row(x, weight, gain, bias, residual, out, rows, eps, outputs: tl.constexpr, inputs: tl.constexpr,
             M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
             EVEN: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
             ADD: tl.constexpr):  # fmt: skip
    """M = 1, SPLIT = 1. Weight rows of ups lie `outputs` below those of gates."""
    row = tl.arange(0, 1) + tl.program_id(1)
    outs = tl.program_id(0) * N + tl.arange(0, N)
    acc = tl.zeros([N, K], tl.float32)
    acc_up = tl.zeros([N, K], tl.float32)
    squares = tl.zeros([1, K], tl.float32)
    for start in tl.range(0, inputs, K, num_stages=STAGES):
        ins = (start + tl.arange(0, K))[None, :]
        w = _load_weights(weight, outs[:, None], ins, outputs, inputs, EVEN)
        value, square = _load_inputs(x, gain, row[:, None], ins, rows, inputs, NORM, EVEN)
        acc += value * w.to(tl.float32)
        squares += square
        if GATED:
            w = _load_weights(weight + outputs * inputs, outs[:, None], ins, outputs, inputs, EVEN)
            acc_up += value * w.to(tl.float32)
    y, up = tl.sum(acc, 1)[None, :], tl.sum(acc_up, 1)[None, :]
    _finish(y, up, tl.sum(squares, 1), bias, residual, out, row, outs, rows, outputs, inputs, eps,
            NORM, BIAS, GATED, ADD)  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _some_rows(x, weight, gain, bias, residual, out, rows, eps, outputs: tl.constexpr, inputs: tl.constexpr,
               M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
               EVEN: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
               ADD: tl.constexpr):  # fmt: skip
    """M rows at a time, SPLIT = 1."""
    row = tl.program_id(1) * M + tl.arange(0, M)
    outs = tl.program_id(0) * N + tl.arange(0, N)
    acc = tl.zeros([M, N], tl.float32)
    acc_up = tl.zeros([M, N], tl.float32)
    squares = tl.zeros([M], tl.float32)
    for start in tl.range(0, inputs, K, num_stages=STAGES):
        ins = start + tl.arange(0, K)
        w = _load_weights(weight, outs[None, :], ins[:, None], outputs, inputs, EVEN)
        value, square = _load_inputs(x, gain, row[:, None], ins[None, :], rows, inputs, NORM, EVEN)
        value = value.to(w.dtype)
        acc = tl.dot(value, w, acc, input_precision="ieee")
        if NORM:
            squares += tl.sum(square, 1)
        if GATED:
            above = weight + outputs * inputs
            w = _load_weights(above, outs[None, :], ins[:, None], outputs, inputs, EVEN)
            acc_up = tl.dot(value, w, acc_up, input_precision="ieee")
    _finish(acc, acc_up, squares, bias, residual, out, row, outs, rows, outputs, inputs, eps,
            NORM, BIAS, GATED, ADD)  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _shared_rows(x, weight, gain, bias, residual, out, rows, eps, outputs: tl.constexpr, inputs: tl.constexpr,
                 M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
                 EVEN: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
                 ADD: tl.constexpr):  # fmt: skip
    """As _some_rows, for matrices that are not gated, K shared among SPLIT parts of a program."""
    row = tl.program_id(1) * M + tl.arange(0, M)
    outs = tl.program_id(0) * N + tl.arange(0, N)
    part = (tl.arange(0, SPLIT) * K)[:, None, None]
    acc = tl.zeros([SPLIT, M, N], tl.float32)
    squares = tl.zeros([SPLIT, M], tl.float32)
    for start in tl.range(0, inputs, SPLIT * K, num_stages=STAGES):
        ins = start + part + tl.arange(0, K)[None, :, None]
        w = _load_weights(weight, outs[None, None, :], ins, outputs, inputs, EVEN)
        ins = start + part + tl.arange(0, K)[None, None, :]
        value, square = _load_inputs(x, gain, row[None, :, None], ins, rows, inputs, NORM, EVEN)
        acc = tl.dot(value.to(w.dtype), w, acc, input_precision="ieee")
        if NORM:
            squares += tl.sum(square, 2)
    y = tl.sum(acc, 0)
    _finish(y, y, tl.sum(squares, 0), bias, residual, out, row, outs, rows, outputs, inputs, eps,
            NORM, BIAS, GATED, ADD)  # fmt: skip


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    shape: Tile,
) -> Tensor:
    """norm(x) times weight transposed, plus bias and residual; gated: silu of the first half times the second.

    x: [rows, inputs], contiguous; weight: [outputs, inputs], or [2 * outputs, inputs] if gated, contiguous, of x's
    dtype; bias: [outputs]; residual: [rows, outputs]. shape: how the work is cut up, see tiles.tile.
    Accumulated in float32. Returns [rows, outputs] in out_dtype, x's by default.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(rows, outputs, dtype=out_dtype or x.dtype)
    kernel = _one_row if shape.rows == 1 else _some_rows if shape.split == 1 else _shared_rows
    kernel[(triton.cdiv(outputs, shape.outputs), triton.cdiv(rows, shape.rows))](
        x,
        weight,
        norm.weight if norm else x,
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
        rows,
        norm.eps if norm else 0.0,
        outputs,
        inputs,
        M=shape.rows,
        N=shape.outputs,
        K=shape.inputs,
        SPLIT=shape.split,
        STAGES=shape.stages,
        EVEN=outputs % shape.outputs == 0 and inputs % (shape.inputs * shape.split) == 0,
        NORM=norm is not None,
        BIAS=bias is not None,
        GATED=gated,
        ADD=residual is not None,
        num_warps=shape.warps,
    )
    return out


def linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    read = x if norm is None else rms_norm_reference(x, norm.weight, norm.eps)
    y = F.linear(read.float(), weight.float(), None if bias is None else bias.float())
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual is not None:
        y = y + residual.float()
    return y.to(out_dtype or x.dtype)
