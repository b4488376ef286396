"""Products with what comes before and after them, against plain torch; tests/gpu runs the same checks compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.kernels.linear import Norm, linear, linear_prepared, linear_reference, prepare_reference
from distspec.kernels.norm import rms_norm_reference
from distspec.kernels.tiles import Tile
from tests.unit.kernels.test_elementwise import CPU, close

pytestmark = pytest.mark.needs("interpreter")


def check_linear(
    rows: int,
    sizes: tuple[int, int],
    normed: bool,
    after: str,
    device: torch.device,
    dtype: torch.dtype,
    shape: Tile,
) -> None:
    """sizes: outputs and inputs. after: bias, gated, residual, or prepared: residual and made ready for a norm."""
    outputs, inputs = sizes
    doubled = 2 * outputs if after == "gated" else outputs
    x = torch.randn(rows, inputs).to(device, dtype)
    weight = (torch.randn(doubled, inputs) * inputs**-0.5).to(device, dtype)
    norm = Norm((1 + 0.1 * torch.randn(inputs)).to(device, dtype), 1e-5) if normed else None
    bias = torch.randn(outputs).to(device, dtype) if after == "bias" else None
    added = torch.randn(rows, outputs).to(device, dtype) if after in ("residual", "prepared") else None
    wide = torch.float32 if after == "bias" else None
    want = linear_reference(x, weight, bias, norm=norm, gated=after == "gated", residual=added, out_dtype=wide)
    if after == "prepared" and added is not None:
        then = Norm((1 + 0.1 * torch.randn(outputs)).to(device, dtype), 1e-5)
        read = x if norm is None else rms_norm_reference(x, norm.weight, norm.eps)
        got, ready = linear_prepared(read, weight, None, added, then, shape)
        book = prepare_reference(got, then)
        close(ready.rows / 2, book.rows / 2)
        torch.testing.assert_close(ready.squares.sum(0), book.squares[0], rtol=1e-4, atol=1e-4)
    else:
        early = norm is not None and shape.rows > 1
        got = linear(
            prepare_reference(x, norm) if early and norm is not None else x,
            weight,
            bias,
            norm=None if early else norm,
            gated=after == "gated",
            residual=added,
            out_dtype=wide,
            shape=shape,
        )
    assert got.dtype == want.dtype
    close(got.to(dtype) / 2, want.to(dtype) / 2)


ONE = Tile(1, 4, 16, 1, 2, 1)
SOME = Tile(16, 16, 16, 1, 2, 1)
SHARED = Tile(16, 8, 16, 2, 2, 1)
APART = Tile(16, 16, 16, 1, 2, 1, apart=2)


@settings(max_examples=40)
@given(
    st.sampled_from([(1, ONE), (2, ONE), (3, SOME), (18, SOME), (3, SHARED), (18, SHARED), (3, APART), (18, APART)]),
    st.sampled_from([(4, 16), (32, 64), (7, 24), (1, 5), (600, 40)]),
    st.booleans(),
    st.sampled_from(["bias", "gated", "residual", "prepared"]),
)
def test_products(work: tuple[int, Tile], sizes: tuple[int, int], normed: bool, after: str) -> None:
    rows, shape = work
    boxed = shape.rows > 1 and shape.split == 1  # boxes begin at multiples of 16 bytes
    if not (boxed and sizes[1] % 4) and not (shape.split * shape.apart > 1 and after == "gated"):
        check_linear(rows, sizes, normed, after, CPU, torch.float32, shape)
