"""A product is the same whichever way it is computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distspec.models import product


@pytest.mark.parametrize("amd", [True, False])
@given(rows=st.integers(1, 10), width=st.sampled_from([7, 64, 1023, 1024, 1536]), bias=st.booleans())
def test_linear_is_the_product_by_definition(amd: bool, rows: int, width: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows * width)
    x, weight = torch.randn(rows, width, generator=generator), torch.randn(33, width, generator=generator)
    add = torch.randn(33, generator=generator) if bias else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product, "_mkl_on_amd", lambda: amd)
        found = product.linear(x, weight, add)
    want = x.double() @ weight.double().t() + (0 if add is None else add.double())
    torch.testing.assert_close(found, want.float(), atol=1e-4, rtol=1e-4)
    assert found.is_contiguous()
