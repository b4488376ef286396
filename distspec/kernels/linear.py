"""Products of a few rows with a weight matrix, with what comes before and after them in the same kernel.

Knows rows, matrices and tiles. Does not know models. At a handful of rows such a product is the reading of its matrix,
and a step is bound by the number of kernels. So SiLU x up and the residual are added before the result leaves the
registers, and an RMS norm is a scale: the norm's weight is multiplied into the input, and the root of the input's mean
square, a number per row, into the result. One row is multiplied elementwise, each program having whole weight rows in
its registers, the first of them while the kernel before still runs, and finds that number on the way; more go through
the matrix units, padded, and are handed it by the product before (`Prepared`). There the warps of a program may share
the inputs among them (`split`), which keeps more reads in flight where a matrix has few rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from distspec.kernels.launch import early, in_turn
from distspec.kernels.norm import rms_norm_reference
from distspec.kernels.tiles import Tile


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm. weight: [width]."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rows x as the product behind their norm reads them.

    rows: x times the norm's weight, [rows, width] in x's dtype. squares: float32 [parts, rows], which add up to the sum
    of squares of each row of x.
    """

    rows: Tensor
    squares: Tensor
    norm: Norm


@triton.jit
def _load_weights(weight, outs, ins, outputs, inputs, EVEN: tl.constexpr):
    """A tile of weights in the shape that `outs` and `ins` broadcast to."""
    at = weight + outs.to(tl.int64) * inputs + ins
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(outs < outputs) & (ins < inputs), other=0.0)


@triton.jit
def _load_rows(x, row, ins, rows, inputs, EVEN: tl.constexpr):
    """A tile of rows in the shape that `row` and `ins` broadcast to, zero where there are none."""
    inside = row < rows
    if not EVEN:
        inside = inside & (ins < inputs)
    return tl.load(x + row.to(tl.int64) * inputs + ins, mask=inside, other=0.0)


@triton.jit
def _finish(y, up, mean, bias, residual, gain, out, scaled, parts, row, outs, rows, eps, outputs, NORM: tl.constexpr,
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
def _mean(squares, row, rows, inputs, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr):
    """[M]: of the squares whose parts are given."""
    part = tl.arange(0, PARTS_PAD)
    inside = (part < PARTS)[:, None] & (row < rows)[None, :]
    return tl.sum(tl.load(squares + part[:, None] * rows + row[None, :], mask=inside, other=0.0), 0) / inputs


@triton.jit
def _load_both(weight, outs, ins, outputs, inputs, EVEN: tl.constexpr, GATED: tl.constexpr):
    """A tile of weights, gates if GATED, and that of the ups, which lie `outputs` rows below those of gates."""
    w = _load_weights(weight, outs, ins, outputs, inputs, EVEN)
    if GATED:
        return w, _load_weights(weight + outputs * inputs, outs, ins, outputs, inputs, EVEN)
    return w, w


@triton.jit
def _add_products(x, gain, w, up, row, ins, inputs, acc, acc_up, squared, NORM: tl.constexpr, GATED: tl.constexpr):
    """Of one row with a tile of weights."""
    inside = ins < inputs
    value = tl.load(x + row.to(tl.int64)[:, None] * inputs + ins, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        squared += value * value
        value *= tl.load(gain + ins, mask=inside, other=0.0).to(tl.float32)
    acc += value * w.to(tl.float32)
    if GATED:
        acc_up += value * up.to(tl.float32)
    return acc, acc_up, squared


@triton.jit(do_not_specialize=["rows"])
def _one_row(x, weight, gain, squares, bias, residual, next_gain, out, scaled, parts, rows, eps,
             outputs: tl.constexpr, inputs: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
             SPLIT: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
             PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
             ADD: tl.constexpr, PREPARE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """M = 1, SPLIT = 1, and the norm is applied here."""
    row = tl.arange(0, 1) + tl.program_id(1)
    outs = tl.program_id(0) * N + tl.arange(0, N)
    ins = tl.arange(0, K)[None, :]
    w, up = _load_both(weight, outs[:, None], ins, outputs, inputs, EVEN, GATED)
    in_turn(EARLY)
    acc = tl.zeros([N, K], tl.float32)
    acc_up = tl.zeros([N, K], tl.float32)
    squared = tl.zeros([1, K], tl.float32)
    acc, acc_up, squared = _add_products(x, gain, w, up, row, ins, inputs, acc, acc_up, squared, NORM, GATED)
    for start in tl.range(K, inputs, K, num_stages=STAGES):
        ins = (start + tl.arange(0, K))[None, :]
        w, up = _load_both(weight, outs[:, None], ins, outputs, inputs, EVEN, GATED)
        acc, acc_up, squared = _add_products(x, gain, w, up, row, ins, inputs, acc, acc_up, squared, NORM, GATED)
    mean = tl.sum(squared, 1) / inputs
    y, up = tl.sum(acc, 1)[None, :], tl.sum(acc_up, 1)[None, :]
    _finish(y, up, mean, bias, residual, next_gain, out, scaled, parts, row, outs, rows, eps, outputs,
            NORM, BIAS, GATED, ADD, PREPARE)  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _some_rows(x, weight, gain, squares, bias, residual, next_gain, out, scaled, parts, rows, eps,
               outputs: tl.constexpr, inputs: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
               SPLIT: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
               PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
               ADD: tl.constexpr, PREPARE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """M rows at a time, SPLIT = 1."""
    in_turn(EARLY)
    row = tl.program_id(1) * M + tl.arange(0, M)
    outs = tl.program_id(0) * N + tl.arange(0, N)
    acc = tl.zeros([M, N], tl.float32)
    acc_up = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, inputs, K, num_stages=STAGES):
        ins = start + tl.arange(0, K)
        w = _load_weights(weight, outs[None, :], ins[:, None], outputs, inputs, EVEN)
        value = _load_rows(x, row[:, None], ins[None, :], rows, inputs, EVEN)
        acc = tl.dot(value, w, acc, input_precision="ieee")
        if GATED:
            w = _load_weights(weight + outputs * inputs, outs[None, :], ins[:, None], outputs, inputs, EVEN)
            acc_up = tl.dot(value, w, acc_up, input_precision="ieee")
    mean = _mean(squares, row, rows, inputs, PARTS, PARTS_PAD) if NORM else tl.zeros([M], tl.float32)
    _finish(acc, acc_up, mean, bias, residual, next_gain, out, scaled, parts, row, outs, rows, eps, outputs,
            NORM, BIAS, GATED, ADD, PREPARE)  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _shared_rows(x, weight, gain, squares, bias, residual, next_gain, out, scaled, parts, rows, eps,
                 outputs: tl.constexpr, inputs: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
                 SPLIT: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
                 PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
                 ADD: tl.constexpr, PREPARE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """As _some_rows, for matrices that are not gated, the inputs shared among SPLIT parts of a program."""
    in_turn(EARLY)
    row = tl.program_id(1) * M + tl.arange(0, M)
    outs = tl.program_id(0) * N + tl.arange(0, N)
    part = (tl.arange(0, SPLIT) * K)[:, None, None]
    acc = tl.zeros([SPLIT, M, N], tl.float32)
    for start in tl.range(0, inputs, SPLIT * K, num_stages=STAGES):
        ins = start + part + tl.arange(0, K)[None, :, None]
        w = _load_weights(weight, outs[None, None, :], ins, outputs, inputs, EVEN)
        ins = start + part + tl.arange(0, K)[None, None, :]
        acc = tl.dot(_load_rows(x, row[None, :, None], ins, rows, inputs, EVEN), w, acc, input_precision="ieee")
    mean = _mean(squares, row, rows, inputs, PARTS, PARTS_PAD) if NORM else tl.zeros([M], tl.float32)
    y = tl.sum(acc, 0)
    _finish(y, y, mean, bias, residual, next_gain, out, scaled, parts, row, outs, rows, eps, outputs,
            NORM, BIAS, GATED, ADD, PREPARE)  # fmt: skip


def linear(
    x: Tensor | Prepared,
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

    x: [rows, inputs], contiguous; or rows prepared for their norm, if `shape` has more than one row. norm: of x, if it
    has one row. weight: [outputs, inputs], or [2 * outputs, inputs] if gated, contiguous, of x's dtype, read ahead of
    kernels.launch.in_turn; bias: [outputs]; residual: [rows, outputs]. shape: how the work is cut up, see tiles.tile.
    Accumulated in float32. Returns [rows, outputs] in out_dtype, x's by default.
    """
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = weight.new_empty(_rows(x).shape[0], outputs, dtype=out_dtype or weight.dtype)
    _launch(x, weight, bias, norm, gated, residual, None, out, shape)
    return out


def linear_prepared(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, then: Norm, shape: Tile
) -> tuple[Tensor, Prepared]:
    """As `linear`, and the same rows prepared for the norm `then`, which reads them next."""
    rows, outputs = residual.shape
    out, scaled = weight.new_empty(2, rows, outputs)
    parts = torch.empty(triton.cdiv(outputs, shape.outputs), rows, dtype=torch.float32, device=x.device)
    ready = Prepared(scaled, parts, then)
    _launch(x, weight, bias, None, False, residual, ready, out, shape)
    return out, ready


def _rows(x: Tensor | Prepared) -> Tensor:
    return x.rows if isinstance(x, Prepared) else x


def _launch(
    x: Tensor | Prepared,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    gated: bool,
    residual: Tensor | None,
    ready: Prepared | None,
    out: Tensor,
    shape: Tile,
) -> None:
    """ready: where to prepare the result for its norm."""
    read, outputs = _rows(x), out.shape[1]
    rows, inputs = read.shape
    scale = x.norm if isinstance(x, Prepared) else norm
    parts = x.squares.shape[0] if isinstance(x, Prepared) else 1
    kernel = _one_row if shape.rows == 1 else _some_rows if shape.split == 1 else _shared_rows
    kernel[(triton.cdiv(outputs, shape.outputs), triton.cdiv(rows, shape.rows))](
        read,
        weight,
        norm.weight if norm else read,
        x.squares if isinstance(x, Prepared) else read,
        bias if bias is not None else read,
        residual if residual is not None else read,
        ready.norm.weight if ready else read,
        out,
        ready.rows if ready else out,
        ready.squares if ready else out,
        rows,
        scale.eps if scale else 0.0,
        outputs,
        inputs,
        M=shape.rows,
        N=shape.outputs,
        K=shape.inputs,
        SPLIT=shape.split,
        STAGES=shape.stages,
        EVEN=outputs % shape.outputs == 0 and inputs % (shape.inputs * shape.split) == 0,
        NORM=scale is not None,
        PARTS=parts,
        PARTS_PAD=triton.next_power_of_2(parts),
        BIAS=bias is not None,
        GATED=gated,
        ADD=residual is not None,
        PREPARE=ready is not None,
        **early(),
        num_warps=shape.warps,
    )


def prepare_reference(x: Tensor, norm: Norm) -> Prepared:
    """Rows as their norm's product reads them, their squares in one part."""
    scaled = x.float() * norm.weight.float()
    return Prepared(scaled.to(x.dtype), x.float().square().sum(dim=-1)[None], norm)


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
