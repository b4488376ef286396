"""Products with weight matrices at any number of rows: by our own kernels where these are faster, else by cuBLAS.

Knows a residual stream, and which product reads it through a norm or adds to it. Does not know models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from distspec.kernels.activation import silu_mul
from distspec.kernels.linear import Norm, Prepared, linear, linear_prepared
from distspec.kernels.norm import rms_norm
from distspec.kernels.tiles import tile


@dataclass(frozen=True, slots=True)
class Stream:
    """A residual stream between two products. x: [rows, width], contiguous. ready: the same as the norm's product
    that follows reads it, if the one before has prepared that."""

    x: Tensor
    ready: Prepared | None = None


@dataclass(frozen=True, slots=True)
class Reader:
    """What reads the stream through a norm. weight: [outputs, width]; gated: [2 * outputs, width] and no bias, the
    result being silu of the first half times the second."""

    weight: Tensor
    norm: Norm
    bias: Tensor | None = None
    gated: bool = False

    def __call__(self, stream: Stream) -> Tensor:
        """[rows, outputs]."""
        outputs, inputs = self.weight.shape
        rows = stream.x.shape[0]
        cut = tile(rows, outputs // 2 if self.gated else outputs, inputs, self.gated, room(self.weight.device))
        if cut is not None and cut.rows == 1:
            return linear(stream.x, self.weight, self.bias, norm=self.norm, gated=self.gated, shape=cut)
        read = stream.ready if cut is not None else None
        x = rms_norm(stream.x, self.norm.weight, self.norm.eps) if read is None else stream.x
        if cut is not None:
            return linear(read or x, self.weight, self.bias, gated=self.gated, shape=cut)
        y = F.linear(x, self.weight, self.bias)
        return silu_mul(y) if self.gated else y


@dataclass(frozen=True, slots=True)
class Adder:
    """What adds to the stream. weight: [width, inputs]; then: the norm through which the stream is read next."""

    weight: Tensor
    then: Norm
    bias: Tensor | None = None

    def __call__(self, x: Tensor, stream: Stream) -> Stream:
        """x: [rows, inputs], contiguous. The old stream's memory may be the new one's."""
        outputs, inputs = self.weight.shape
        cut = tile(x.shape[0], outputs, inputs, False, room(x.device))
        if cut is None:
            stream.x.addmm_(x, self.weight.t())
            return Stream(stream.x if self.bias is None else stream.x.add_(self.bias))
        if cut.rows == 1:
            return Stream(linear(x, self.weight, self.bias, residual=stream.x, shape=cut))
        return Stream(*linear_prepared(x, self.weight, self.bias, stream.x, self.then, cut))


def float32_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, inputs], contiguous, times weight [outputs, inputs] transposed: float32 [rows, outputs], accumulated and
    kept in float32."""
    cut = tile(x.shape[0], weight.shape[0], weight.shape[1], False, room(x.device))
    if cut is None:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear(x, weight, out_dtype=torch.float32, shape=cut)


@cache
def room(device: torch.device) -> int:
    """Bytes of shared memory that a program may have there."""
    found: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 48 * 1024)
    return found
