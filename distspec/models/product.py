"""The product of a few rows with a weight matrix, in whatever layout the device multiplies fastest.

Knows one thing about processors: MKL chooses its kernels by vendor, and on AMD its products of 1 to 32 rows with a
matrix as it is stored take one and a half times to three times as long as oneDNN's with a matrix packed in blocks.
On Intel MKL is the faster one at 1 or 2 rows and as fast above (docs/log.md). Does not know models.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKED_FOR_ROWS = 16
"""oneDNN lays blocks out for a number of rows; this layout is the best one, or next to it, from 1 to 512."""

_FEWEST_ROWS = 4
"""Fewer rows take longer than these, and one row alone may round otherwise than the same row among others."""


class Matrix:
    """weight [out, in] and bias [out] or None, to be multiplied with rows.

    float32 weights on an AMD CPU are packed, which takes memory of its own; a row's product is then the same to
    the bit whatever rows stand beside it. Nothing in here is ever written to.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._packed: Tensor | None = None
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and _packs():
            with torch.no_grad():
                self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, in], contiguous. Returns x times weight transposed, plus bias: [rows, out], contiguous."""
        if self._packed is None:
            return F.linear(x, self._weight, self._bias)
        rows = x.shape[0]
        if rows < _FEWEST_ROWS:
            x = F.pad(x, (0, 0, 0, _FEWEST_ROWS - rows))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out if rows >= _FEWEST_ROWS else out[:rows]


@cache
def _packs() -> bool:
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    processor = Path("/proc/cpuinfo")
    return has_onednn and processor.is_file() and "AuthenticAMD" in processor.read_text()
