from __future__ import annotations

import torch

from distspec.kv.pool import KVPool


def pool() -> KVPool:
    made = KVPool(3, 8, 2, 4, dtype=torch.float32, device=torch.device("cpu"))
    made.data.copy_(torch.arange(made.data.numel()).reshape(made.data.shape))
    return made


def test_layers_are_views_and_an_empty_pool_holds_no_nan() -> None:
    empty = KVPool(2, 4, 1, 8, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert not empty.data.any()
    empty.layers[1][0][3] = 1
    assert bool(empty.data[1, 0, 3].all())
    assert empty.data[0, 0, 0].nbytes * 4 == KVPool.position_bytes(2, 1, 8, torch.bfloat16)


def test_moves_happen_at_once() -> None:
    before, after = pool(), pool()
    after.move(torch.tensor([1, 2, 5]), torch.tensor([2, 1, 0]))
    assert torch.equal(after.data[:, :, [2, 1, 0]], before.data[:, :, [1, 2, 5]])
    assert torch.equal(after.data[:, :, 3:], before.data[:, :, 3:])


def test_what_is_gathered_can_be_scattered_elsewhere() -> None:
    source, target = pool(), pool()
    there = torch.tensor([6, 0])
    target.scatter(there, source.gather(torch.tensor([3, 4])))
    assert torch.equal(target.gather(there), source.gather(torch.tensor([3, 4])))
    assert torch.equal(target.data[:, :, 1:6], source.data[:, :, 1:6])
