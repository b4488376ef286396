"""Pages into one piece and back against plain torch; tests/gpu runs the same check compiled."""

from __future__ import annotations

import pytest
import torch

from distspec.kernels.pages import gather_pages, scatter_pages
from distspec.kv.pool import KVPool
from tests.unit.kernels.test_elementwise import CPU

pytestmark = pytest.mark.needs("interpreter")


def pool(kv_heads: int, head_dim: int, features: int, dtype: torch.dtype, device: torch.device) -> KVPool:
    made = KVPool(3, 40, kv_heads, head_dim, features=features, dtype=dtype, device=device)
    made.data.normal_()
    made.features.normal_()
    return made


def check_pages(
    count: int, kv_heads: int, head_dim: int, features: int, dtype: torch.dtype, device: torch.device
) -> None:
    source, target = (pool(kv_heads, head_dim, features, dtype, device) for _ in range(2))
    here, there = (torch.randperm(40)[:count].to(device) for _ in range(2))
    content = gather_pages(source.data, source.features, here)
    want = torch.cat((source.data[:, :, here].flatten(), source.features[here].flatten()))
    assert torch.equal(content, want)
    data, kept = target.data.clone(), target.features.clone()
    data[:, :, there], kept[there] = source.data[:, :, here], source.features[here]
    scatter_pages(target.data, target.features, there, content)
    assert torch.equal(target.data, data)
    assert torch.equal(target.features, kept)


@pytest.mark.parametrize("count", [1, 4, 21])
@pytest.mark.parametrize(("kv_heads", "head_dim", "features"), [(1, 8, 0), (2, 6, 0), (3, 4, 10), (2, 8, 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_go_into_one_piece_and_back(
    count: int, kv_heads: int, head_dim: int, features: int, dtype: torch.dtype
) -> None:
    check_pages(count, kv_heads, head_dim, features, dtype, CPU)


def test_no_positions_are_no_piece() -> None:
    of = pool(2, 4, 3, torch.float32, CPU)
    assert not gather_pages(of.data, of.features, torch.empty(0, dtype=torch.int64)).numel()
