"""A product with a weight matrix at any number of rows: by our own kernel where that is faster, else by cuBLAS.

Knows what comes before and after a product. Does not know models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from distspec.kernels.activation import silu_mul
from distspec.kernels.linear import Norm, linear
from distspec.kernels.norm import rms_norm
from distspec.kernels.tiles import tile


@dataclass(frozen=True, slots=True)
class Product:
    """Arguments as of linear.linear. No bias where gated, neither bias nor residual where there is an out_dtype."""

    weight: Tensor
    bias: Tensor | None = None
    norm: Norm | None = None
    gated: bool = False
    out_dtype: torch.dtype | None = None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [rows, inputs], contiguous. Returns [rows, outputs]; residual may be written to, and be what is
        returned."""
        outputs, inputs = self.weight.shape
        cut = tile(x.shape[0], outputs // 2 if self.gated else outputs, inputs, self.gated)
        if cut is not None:
            return linear(
                x,
                self.weight,
                self.bias,
                norm=self.norm,
                gated=self.gated,
                residual=residual,
                out_dtype=self.out_dtype,
                shape=cut,
            )
        read = x if self.norm is None else rms_norm(x, self.norm.weight, self.norm.eps)
        if self.out_dtype is not None:
            return torch.mm(read, self.weight.t(), out_dtype=self.out_dtype)
        if residual is None:
            y = F.linear(read, self.weight, self.bias)
            return silu_mul(y) if self.gated else y
        residual.addmm_(read, self.weight.t())
        return residual if self.bias is None else residual.add_(self.bias)
