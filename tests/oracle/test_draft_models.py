"""Draft models against dense ones that share no code with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distspec.models.dflash import Dflash
from tests import plain
from tests.causal import Causal
from tests.featured import BLOCKS, FED, SPECULATORS_ONLY, features, made, outer, plain_fed, published

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


@pytest.mark.parametrize("name", FED | SPECULATORS_ONLY)
@torch.inference_mode()
def test_a_fed_layer_computes_what_the_dense_one_does(name: str, tmp_path: Path) -> None:
    """The text with the target's features, then three steps that read its own output."""
    model = made(name)
    assert not isinstance(model, Dflash)
    reference = plain_fed(name, tmp_path)
    given = features(TEXT, model.taps)
    attend, path, start = Causal(), [], 0
    rows, fed = TEXT[1:], model.enter(given[1:])
    for _ in range(4):
        hidden = model.forward(torch.tensor(rows), fed, torch.arange(start, start + len(rows)), attend)
        logits = model.logits(hidden[-1:])[0]
        torch.testing.assert_close(logits, reference.next(TEXT, given, path), atol=1e-4, rtol=1e-4)
        start += len(rows)
        rows, fed = [int(logits.argmax())], hidden[-1:]
        path += rows


@pytest.mark.parametrize("name", BLOCKS)
@torch.inference_mode()
def test_a_block_computes_what_the_dense_one_does(name: str, tmp_path: Path) -> None:
    model = made(name)
    assert isinstance(model, Dflash)
    _, tree, tensors = published(name, tmp_path)
    given = features(TEXT, model.taps)
    base, count = len(TEXT) - 1, model.settings.block_size

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        before = model.context(layer, model.enter(given[1:]), torch.arange(base))
        k, v = (torch.cat(pair) for pair in zip(before, (k, v), strict=True))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    tokens = torch.tensor([TEXT[-1], *[model.settings.mask_token] * (count - 1)])
    hidden = model.forward(tokens, torch.arange(base, base + count), attend)
    expected = plain.block(tree, tensors, outer(), TEXT, given)
    torch.testing.assert_close(model.logits(hidden[1:]), expected, atol=1e-4, rtol=1e-4)
