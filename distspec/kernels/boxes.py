"""Products of some rows with a matrix that comes in boxes: the copy engine fetches them, not a program's threads.

Knows boxes of rows and of weights. Does not know what comes before and after a product: see linear.py. A thread that
asks for its own weights has addresses to compute and registers to keep them in; the copy engine (CUDA C++ Programming
Guide, tensor memory access) takes a corner and brings a box, so what is on its way is bound by shared memory alone.
Outputs lie along the matrix units' longer side, rows along the shorter one, which may be 16. Where a matrix has few
outputs, programs share its inputs, and `add_up` finishes their sums: always in one order, so equal rows stay equal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from distspec.kernels.launch import in_turn
from distspec.kernels.results import finish, mean_square


@triton.jit(do_not_specialize=["rows"])
def boxes(x, weight, squares, bias, residual, next_gain, out, scaled, parts, rows, eps, outputs, inputs,
          M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, APART: tl.constexpr, STAGES: tl.constexpr,
          NORM: tl.constexpr, PARTS: tl.constexpr, PARTS_PAD: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
          ADD: tl.constexpr, PREPARE: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Grid (tiles of N outputs, tiles of M rows, APART). x, weight: descriptors of boxes [M, K] and [N, K], zero beyond
    the edges; what lies beyond the gates are ups, which are not stored. APART > 1: out is float32 [APART, rows,
    outputs], sums that nothing has been done to."""
    tile, share = tl.program_id(0), tl.program_id(2)
    steps = tl.cdiv(inputs, K)
    first, last = steps * share // APART * K, steps * (share + 1) // APART * K
    top = tl.program_id(1) * M
    in_turn(EARLY)
    acc = tl.zeros([N, M], tl.float32)
    acc_up = tl.zeros([N, M], tl.float32)
    for start in tl.range(first, last, K, num_stages=STAGES):
        w = weight.load([tile * N, start])
        read = x.load([top, start])
        acc = tl.dot(w, read.T, acc, input_precision="ieee")
        if GATED:
            up = weight.load([outputs + tile * N, start])
            acc_up = tl.dot(up, read.T, acc_up, input_precision="ieee")
    row, outs = top + tl.arange(0, M), tile * N + tl.arange(0, N)
    if APART == 1:
        mean = mean_square(squares, row, rows, inputs, PARTS, PARTS_PAD) if NORM else tl.zeros([M], tl.float32)
        finish(tl.trans(acc), tl.trans(acc_up), mean, bias, residual, next_gain, out, scaled, parts, row, outs, rows,
               eps, outputs, NORM, BIAS, GATED, ADD, PREPARE)  # fmt: skip
    else:
        at = out + (share * rows + row)[None, :].to(tl.int64) * outputs + outs[:, None]
        tl.store(at, acc, mask=(row < rows)[None, :] & (outs < outputs)[:, None])


@triton.jit(do_not_specialize=["rows"])
def add_up(sums, squares, bias, residual, next_gain, out, scaled, parts, rows, eps, outputs, inputs,
           N: tl.constexpr, APART: tl.constexpr, APART_PAD: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr,
           PARTS_PAD: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PREPARE: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    """Grid (tiles of N outputs, rows). sums: float32 [APART, rows, outputs], by `boxes`."""
    row, outs = tl.program_id(1) + tl.arange(0, 1), tl.program_id(0) * N + tl.arange(0, N)
    share = tl.arange(0, APART_PAD)
    in_turn(EARLY)
    at = sums + (share * rows + tl.program_id(1))[:, None].to(tl.int64) * outputs + outs[None, :]
    there = (share < APART)[:, None] & (outs < outputs)[None, :]
    y = tl.sum(tl.load(at, mask=there, other=0.0), 0)[None, :]
    mean = mean_square(squares, row, rows, inputs, PARTS, PARTS_PAD) if NORM else tl.zeros([1], tl.float32)
    finish(y, y, mean, bias, residual, next_gain, out, scaled, parts, row, outs, rows, eps, outputs, NORM, BIAS, False,
           ADD, PREPARE)  # fmt: skip
