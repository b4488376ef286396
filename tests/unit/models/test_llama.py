"""What holds for every decoder of the family, whatever its weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distspec.models import ModelConfig, prefix_layers, random_model
from distspec.models.llama import Llama, parameters
from distspec.models.rope import rope_table
from tests.causal import logits
from tests.shapes import KINDS, LLAMA

CPU = torch.device("cpu")
TOKENS = [(7 * i * i + 3 * i) % LLAMA.vocab_size for i in range(24)]


def make(config: ModelConfig = LLAMA, seed: int = 0, dtype: torch.dtype = torch.float32) -> Llama:
    return random_model(config, seed=seed, dtype=dtype, device=CPU)


def values_only(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in which each row sees itself."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1).flatten(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [[1] * 24, [10, 14], [23, 1]])
def test_chunks_do_not_change_the_result(kind: str, chunks: list[int]) -> None:
    model = make(KINDS[kind])
    torch.testing.assert_close(logits(model, TOKENS, chunks), logits(model, TOKENS), atol=1e-4, rtol=1e-4)


@given(st.permutations(range(8)))
def test_rows_know_nothing_of_each_other(order: list[int]) -> None:
    model, tokens, positions = make(), torch.tensor(TOKENS[:8]), torch.arange(40, 48)
    plain = model.forward(tokens, positions, values_only)
    shuffled = model.forward(tokens[order], positions[order], values_only)
    torch.testing.assert_close(shuffled, plain[order], atol=1e-5, rtol=1e-5)


def test_every_parameter_matters() -> None:
    """No matrix, bias or norm is forgotten: changing any one changes the logits."""
    for config in KINDS.values():
        model = make(config)
        before = logits(model, TOKENS)
        for name, weight in model.weights.items():
            changed = Llama(config, model.weights | {name: weight + 0.5 * torch.rand_like(weight)})
            assert not torch.allclose(logits(changed, TOKENS), before, atol=1e-3), name


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 150))
def test_rotary_scores_depend_on_distance_only(a: int, b: int, shift: int) -> None:
    table = rope_table(LLAMA)
    q, k = torch.randn(2, LLAMA.head_dim, generator=torch.Generator().manual_seed(1))

    def turned(x: Tensor, position: int) -> Tensor:
        cos, sin = table[:, position]
        return x * cos + x.roll(LLAMA.head_dim // 2) * sin

    here, there = turned(q, a) @ turned(k, b), turned(q, a + shift) @ turned(k, b + shift)
    torch.testing.assert_close(here, there, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(turned(q, 0), q)


def test_random_weights_follow_from_the_seed_alone() -> None:
    one, same, other = make(seed=1), make(seed=1), make(seed=2)
    half = make(seed=1, dtype=torch.bfloat16)
    assert one.weights.keys() == parameters(LLAMA).keys()
    for name, weight in one.weights.items():
        assert torch.equal(weight, same.weights[name])
        assert torch.equal(weight.bfloat16(), half.weights[name])
        assert not torch.equal(weight, other.weights[name])


def test_prefix_layers_is_the_model_cut_short() -> None:
    model = make()
    assert torch.equal(logits(prefix_layers(model, LLAMA.num_layers), TOKENS), logits(model, TOKENS))
    short = prefix_layers(model, 1)
    written = Llama(replace(LLAMA, num_layers=1), {n: w for n, w in model.weights.items() if ".1." not in n})
    assert torch.equal(logits(short, TOKENS), logits(written, TOKENS))
    assert not torch.allclose(logits(short, TOKENS), logits(model, TOKENS))
    assert short.embedding.data_ptr() == model.embedding.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_precision_models_are_not_rounded_to_it(dtype: torch.dtype) -> None:
    found = logits(make(dtype=dtype), TOKENS)
    assert found.dtype == torch.float32
    assert (found != found.to(dtype)).float().mean() > 0.9
    torch.testing.assert_close(found, logits(make(), TOKENS), atol=0.15, rtol=0.1)
