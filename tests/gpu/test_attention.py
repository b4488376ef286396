"""The reference backend on a GPU, in one part and in two."""

from __future__ import annotations

import random

import pytest
import torch

from tests.unit.attention.test_sdpa import compare

pytestmark = pytest.mark.needs("gpu")
CUDA = torch.device("cuda")
SIZES = [1, 1, 2, 6, 16, 17, 40, 140]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("apart", [None, 1, 20])
@pytest.mark.parametrize("seed", range(6))
def test_rows_see_their_path_and_nothing_else(seed: int, page_size: int, apart: int | None, dtype: torch.dtype) -> None:
    sizes = random.Random(seed).choices(SIZES, k=4)
    compare(seed, page_size, [(4, 4), (6, 2), (3, 1)][seed % 3], sizes, apart, CUDA, dtype)
