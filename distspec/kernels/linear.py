"""Products of a few rows with a weight matrix, with what comes before and after them in the same kernel.

Knows rows, matrices and tiles. Does not know models. At a handful of rows such a product is the reading of its matrix,
and a step is bound by the number of kernels. So SiLU x up and the residual are added before the result leaves the
registers, and an RMS norm is a scale: the norm's weight is multiplied into the input, and the root of the input's mean
square, a number per row, into the result. One row is multiplied elementwise, each program having whole weight rows in
its registers, the first of them while the kernel before still runs, and finds that number on the way; more go through
the matrix units, padded, and are handed it by the product before (`Prepared`): from boxes (boxes.py), or, at a few rows
and few outputs, by programs whose warps share the inputs among them (`split`), which keeps more reads in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from distspec.kernels.boxes import add_up, boxes
from distspec.kernels.launch import early, in_turn
from distspec.kernels.norm import rms_norm_reference
from distspec.kernels.results import finish, mean_square
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
    finish(y, up, mean, bias, residual, next_gain, out, scaled, parts, row, outs, rows, eps, outputs,
            NORM, BIAS, GATED, ADD, PREPARE)  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _shared_rows(x, weight, gain, squares, bias, residual, next_gain, out, scaled, parts, rows, eps,
                 outputs: tl.constexpr, inputs: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
                 SPLIT: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
                 PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
                 ADD: tl.constexpr, PREPARE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """M rows at a time, for matrices that are not gated, the inputs shared among SPLIT parts of a program."""
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
    mean = mean_square(squares, row, rows, inputs, PARTS, PARTS_PAD) if NORM else tl.zeros([M], tl.float32)
    y = tl.sum(acc, 0)
    finish(y, y, mean, bias, residual, next_gain, out, scaled, parts, row, outs, rows, eps, outputs,
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


_ADDED = 512
"""Outputs of a program that adds up what others have computed."""


def linear_prepared(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, then: Norm, shape: Tile
) -> tuple[Tensor, Prepared]:
    """As `linear`, and the same rows prepared for the norm `then`, which reads them next."""
    rows, outputs = residual.shape
    out, scaled = weight.new_empty(2, rows, outputs)
    width = shape.outputs if shape.apart == 1 else _ADDED
    parts = torch.empty(triton.cdiv(outputs, width), rows, dtype=torch.float32, device=x.device)
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
    read, (rows, outputs) = _rows(x), out.shape
    held = x if isinstance(x, Prepared) else None
    scale, parts = (held.norm, held.squares.shape[0]) if held else (norm, 1)
    beside = (
        held.squares if held else read,
        bias if bias is not None else read,
        residual if residual is not None else read,
        ready.norm.weight if ready else read,
        out,
        ready.rows if ready else out,
        ready.squares if ready else out,
    )
    sizes = (rows, scale.eps if scale else 0.0, outputs, read.shape[1])
    flags = {
        "NORM": scale is not None,
        "PARTS": parts,
        "PARTS_PAD": triton.next_power_of_2(parts),
        "BIAS": bias is not None,
        "ADD": residual is not None,
        "PREPARE": ready is not None,
        **early(),
    }
    if shape.rows > 1 and shape.split == 1:
        _launch_boxes(read, weight, beside, sizes, gated, flags, shape)
        return
    cut = {"M": shape.rows, "N": shape.outputs, "K": shape.inputs, "SPLIT": shape.split, "STAGES": shape.stages}
    kernel = _one_row if shape.rows == 1 else _shared_rows
    kernel[(triton.cdiv(outputs, shape.outputs), triton.cdiv(rows, shape.rows))](
        read,
        weight,
        norm.weight if norm else read,
        *beside,
        *sizes,
        **cut,
        EVEN=outputs % shape.outputs == 0 and read.shape[1] % (shape.inputs * shape.split) == 0,
        GATED=gated,
        **flags,
        num_warps=shape.warps,
    )


def _launch_boxes(
    x: Tensor,
    weight: Tensor,
    beside: tuple[Tensor, ...],
    sizes: tuple[int, float, int, int],
    gated: bool,
    flags: dict[str, bool | int],
    shape: Tile,
) -> None:
    """beside: squares, bias, residual, next_gain, out, scaled and parts, as `boxes` takes them."""
    rows, _, outputs, inputs = sizes
    boxed = (
        TensorDescriptor(x, [rows, inputs], [inputs, 1], [shape.rows, shape.inputs]),
        TensorDescriptor(weight, [weight.shape[0], inputs], [inputs, 1], [shape.outputs, shape.inputs]),
    )
    grid = triton.cdiv(outputs, shape.outputs), triton.cdiv(rows, shape.rows), shape.apart
    cut = {"M": shape.rows, "N": shape.outputs, "K": shape.inputs, "APART": shape.apart, "STAGES": shape.stages}
    if shape.apart == 1:
        boxes[grid](*boxed, *beside, *sizes, **cut, GATED=gated, **flags, num_warps=shape.warps)
        return
    sums = torch.empty(shape.apart, rows, outputs, dtype=torch.float32, device=x.device)
    undone = flags | {name: False for name in ("NORM", "BIAS", "ADD", "PREPARE")}
    boxes[grid](*boxed, *[sums] * len(beside), *sizes, **cut, GATED=False, **undone, num_warps=shape.warps)
    add_up[triton.cdiv(outputs, _ADDED), rows](
        sums,
        *beside,
        *sizes,
        N=_ADDED,
        APART=shape.apart,
        APART_PAD=triton.next_power_of_2(shape.apart),
        **flags,
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
