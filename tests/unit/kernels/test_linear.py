"""Products with what comes before and after them, against plain torch; tests/gpu runs the same checks compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.kernels.linear import Norm, linear, linear_reference
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
    """sizes: outputs and inputs. after: bias, gated or residual."""
    outputs, inputs = sizes
    doubled = 2 * outputs if after == "gated" else outputs
    x = torch.randn(rows, inputs).to(device, dtype)
    weight = (torch.randn(doubled, inputs) * inputs**-0.5).to(device, dtype)
    options: dict[str, Any] = {
        "bias": torch.randn(outputs).to(device, dtype) if after == "bias" else None,
        "norm": Norm((1 + 0.1 * torch.randn(inputs)).to(device, dtype), 1e-5) if normed else None,
        "gated": after == "gated",
        "residual": torch.randn(rows, outputs).to(device, dtype) if after == "residual" else None,
        "out_dtype": torch.float32 if after == "bias" else None,
    }
    got, want = linear(x, weight, **options, shape=shape), linear_reference(x, weight, **options)
    assert got.dtype == want.dtype
    close(got.to(dtype) / 2, want.to(dtype) / 2)


ONE = Tile(1, 4, 16, 1, 2, 1)
SOME = Tile(16, 16, 16, 1, 2, 1)
SHARED = Tile(16, 8, 16, 2, 2, 1)


@settings(max_examples=40)
@given(
    st.sampled_from([(1, ONE), (2, ONE), (3, SOME), (18, SOME), (3, SHARED), (18, SHARED)]),
    st.sampled_from([(4, 16), (32, 64), (7, 24), (1, 5)]),
    st.booleans(),
    st.sampled_from(["bias", "gated", "residual"]),
)
def test_products(work: tuple[int, Tile], sizes: tuple[int, int], normed: bool, after: str) -> None:
    rows, shape = work
    if not (shape.split > 1 and after == "gated"):
        check_linear(rows, sizes, normed, after, CPU, torch.float32, shape)
