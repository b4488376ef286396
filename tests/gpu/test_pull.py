"""Pages straight out of another pool, compiled, at sizes that models have."""

from __future__ import annotations

import pytest
import torch

from tests.unit.kernels.test_pull import check_pull, check_wait

pytestmark = pytest.mark.needs("gpu")


@pytest.mark.parametrize("count", [1, 16, 37])
@pytest.mark.parametrize("shape", [(8, 128, 0), (8, 128, 12288), (1, 64, 0), (3, 40, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_come_straight_from_another_pool(count: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_pull(count, shape, (16, 48), dtype, torch.device("cuda"))


def test_a_wait_ends_with_the_count_or_a_word_of_the_host_or_its_turns() -> None:
    check_wait(torch.device("cuda"))
