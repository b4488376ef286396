"""SiLU of the gates times what they let through.

Knows rows of gates and ups that lie side by side. Does not know the matrices around it.
"""

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from distspec.kernels.launch import early, in_turn

_BLOCK = 1024


@triton.jit
def _kernel(gate_up, out, inner, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    in_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inner
    gate = tl.load(gate_up + row * 2 * inner + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * inner + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up: [rows, 2 * inner], contiguous, gates first. Returns silu(gate) * up, [rows, inner], in its dtype."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    _kernel[(rows, triton.cdiv(inner, _BLOCK))](gate_up, out, inner, BLOCK=_BLOCK, **early(), num_warps=4)
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
