"""The product of a few rows with a weight matrix.

Knows one thing about processors: MKL chooses its kernels by vendor, and on AMD its matrix-vector product and
its product with few rows reach a half to a quarter of the memory bandwidth, while the mirrored product
(weight times columns) reaches all of it. On Intel it is the other way round. Does not know models.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in] times weight [out, in] transposed, plus bias [out]: [rows, out], contiguous."""
    rows, width = x.shape
    if x.device.type != "cpu" or x.dtype != torch.float32 or not _mirrored(rows, width) or not _mkl_on_amd():
        return F.linear(x, weight, bias)
    columns = (x if rows > 1 else torch.cat((x, x))).t()  # with one column it would be a matrix-vector product
    out = torch.mm(weight, columns).t()[:rows].contiguous()
    return out if bias is None else out + bias


def _mirrored(rows: int, width: int) -> bool:
    """Where the mirrored product won on an EPYC (docs/log.md): few rows, or some more of a narrow matrix."""
    return rows <= 8 if width < 1024 else 2 <= rows <= 3


@cache
def _mkl_on_amd() -> bool:
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    processor = Path("/proc/cpuinfo")
    return has_mkl and processor.is_file() and "AuthenticAMD" in processor.read_text()
