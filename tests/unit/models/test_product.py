"""A product is what its definition says, and where it is packed the same to the bit in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distspec.models import product
from distspec.models.product import Matrix

# (width, height): odd ones and those of the default model.
SHAPES = [(7, 33), (64, 48), (576, 1536), (1536, 576)]


def _operands(rows: int, shape: tuple[int, int], bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(rows)
    width, height = shape
    weight = torch.randn(height, width, generator=generator)
    return torch.randn(rows, width, generator=generator), weight, weight[:, 0].clone() if bias else None


@pytest.mark.parametrize("packs", [True, False])
@given(rows=st.integers(1, 40), shape=st.sampled_from(SHAPES), bias=st.booleans())
def test_a_product_is_the_one_by_definition(packs: bool, rows: int, shape: tuple[int, int], bias: bool) -> None:
    x, weight, add = _operands(rows, shape, bias)
    with pytest.MonkeyPatch.context() as patch:
        if not packs:
            patch.setattr(product, "_packs", lambda: False)
        found = Matrix(weight, add)(x)
    want = x.double() @ weight.double().t() + (0 if add is None else add.double())
    torch.testing.assert_close(found, want.float(), atol=1e-3, rtol=1e-4)
    assert found.is_contiguous()


@pytest.mark.skipif(not product._packs(), reason="matrices are packed on AMD processors only")
@given(st.data())
def test_a_row_does_not_depend_on_its_neighbours(data: st.DataObject) -> None:
    x, weight, bias = _operands(40, data.draw(st.sampled_from(SHAPES)), bias=True)
    start = data.draw(st.integers(0, 39))
    stop = data.draw(st.integers(start + 1, 40))
    matrix = Matrix(weight, bias)
    assert torch.equal(matrix(x[start:stop]), matrix(x)[start:stop])
