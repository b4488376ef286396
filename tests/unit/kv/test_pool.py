from __future__ import annotations

import pytest
import torch

from distspec.kv.pool import KVPool

CPU = torch.device("cpu")
WIDTHS = pytest.mark.parametrize("width", [0, 5])


def pool(width: int) -> KVPool:
    made = KVPool(3, 8, 2, 4, features=width, dtype=torch.float32, device=CPU)
    made.data.copy_(torch.arange(made.data.numel()).reshape(made.data.shape))
    made.features.copy_(-1 - torch.arange(made.features.numel()).reshape(made.features.shape))
    return made


def test_layers_are_views_and_an_empty_pool_holds_no_nan() -> None:
    empty = KVPool(2, 4, 1, 8, dtype=torch.bfloat16, device=CPU)
    assert not empty.data.any()
    assert empty.features.nbytes == 0
    empty.layers[1][0][3] = 1
    assert bool(empty.data[1, 0, 3].all())
    assert empty.data[0, 0, 0].nbytes * 4 == KVPool.position_bytes(2, 1, 8, torch.bfloat16)


@WIDTHS
def test_moves_happen_at_once(width: int) -> None:
    before, after = pool(width), pool(width)
    after.move(torch.tensor([1, 2, 5]), torch.tensor([2, 1, 0]))
    assert torch.equal(after.data[:, :, [2, 1, 0]], before.data[:, :, [1, 2, 5]])
    assert torch.equal(after.data[:, :, 3:], before.data[:, :, 3:])
    assert torch.equal(after.features[[2, 1, 0]], before.features[[1, 2, 5]])
    assert torch.equal(after.features[3:], before.features[3:])


@WIDTHS
def test_what_is_gathered_can_be_scattered_elsewhere(width: int) -> None:
    source, target = pool(width), pool(width)
    here, there = torch.tensor([3, 4]), torch.tensor([6, 0])
    content = source.gather(here)
    assert content.shape == (2 * source.width,)
    assert content.nbytes == 2 * KVPool.position_bytes(3, 2, 4, torch.float32, width)
    target.scatter(there, content)
    assert torch.equal(target.data[:, :, there], source.data[:, :, here])
    assert torch.equal(target.features[there], source.features[here])
    assert torch.equal(target.data[:, :, 1:6], source.data[:, :, 1:6])
    assert torch.equal(target.features[1:6], source.features[1:6])
