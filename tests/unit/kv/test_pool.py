from __future__ import annotations

import pytest
import torch

from distspec.kv.pool import KVPool

CPU = torch.device("cpu")
WIDTHS = pytest.mark.parametrize("width", [0, 5])
LATENTS = pytest.mark.parametrize("latent", [0, 3])


def pool(width: int, latent: int) -> KVPool:
    made = KVPool(3, 8, 2, 4, latent=latent, features=width, dtype=torch.float32, device=CPU)
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


def test_values_of_latents_are_a_part_of_the_keys() -> None:
    made = KVPool(2, 4, 1, 8, latent=6, dtype=torch.float32, device=CPU)
    keys, values = made.layers[1]
    keys[3] = torch.arange(8)
    assert values[3, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert made.data[1, 0, 3].nbytes * 2 == KVPool.position_bytes(2, 1, 8, torch.float32, latent=6)


@LATENTS
@WIDTHS
def test_moves_happen_at_once(width: int, latent: int) -> None:
    before, after = pool(width, latent), pool(width, latent)
    after.move(torch.tensor([1, 2, 5]), torch.tensor([2, 1, 0]))
    assert torch.equal(after.data[:, :, [2, 1, 0]], before.data[:, :, [1, 2, 5]])
    assert torch.equal(after.data[:, :, 3:], before.data[:, :, 3:])
    assert torch.equal(after.features[[2, 1, 0]], before.features[[1, 2, 5]])
    assert torch.equal(after.features[3:], before.features[3:])


@LATENTS
@WIDTHS
def test_what_is_gathered_can_be_scattered_elsewhere(width: int, latent: int) -> None:
    source, target = pool(width, latent), pool(width, latent)
    here, there = torch.tensor([3, 4]), torch.tensor([6, 0])
    content = source.gather(here)
    assert content.shape == (2 * source.width,)
    assert content.nbytes == 2 * KVPool.position_bytes(3, 2, 4, torch.float32, width, latent)
    target.scatter(there, content)
    assert torch.equal(target.data[:, :, there], source.data[:, :, here])
    assert torch.equal(target.features[there], source.features[here])
    assert torch.equal(target.data[:, :, 1:6], source.data[:, :, 1:6])
    assert torch.equal(target.features[1:6], source.features[1:6])
