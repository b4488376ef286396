"""Pages into one piece and back, compiled, at sizes that models have."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.test_pages import check_pages

pytestmark = pytest.mark.needs("gpu")


@pytest.mark.parametrize("count", [1, 16, 37])
@pytest.mark.parametrize(("kv_heads", "head_dim", "features"), [(8, 128, 0), (8, 128, 12288), (1, 64, 0), (3, 40, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_go_into_one_piece_and_back(
    count: int, kv_heads: int, head_dim: int, features: int, dtype: torch.dtype
) -> None:
    check_pages(count, kv_heads, head_dim, features, dtype, torch.device("cuda"))
