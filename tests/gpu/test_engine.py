"""The engine on a GPU: the same noise and draws as on a CPU, and steps equal to plain sequences."""

from __future__ import annotations

import random

import pytest
import torch

from distspec import config
from distspec.engine import Engine
from distspec.engine.measure import step_costs
from distspec.errors import ConfigError
from distspec.models import random_model
from distspec.models.llama import Llama
from distspec.protocol.values import SamplingParams
from distspec.sampling import SamplingRows, draw, gumbel, process
from distspec.sampling.noise import uniform
from tests.oracle.test_engine import GREEDY, mix_and_check
from tests.shapes import TINY, TINY_LATENT

pytestmark = pytest.mark.needs("gpu")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SAMPLED = SamplingParams(max_tokens=1, seed=2**64 - 3, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01)


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_model(TINY, seed=5, dtype=torch.float32, device=CUDA)


def test_noise_has_the_same_bits_everywhere() -> None:
    here, there = (SamplingRows.of([SAMPLED] * 9, range(9), device) for device in (CPU, CUDA))
    first, second = (uniform(rows.seed, rows.choice, rows.position, 49153).cpu() for rows in (here, there))
    assert torch.equal(first, second)
    first, second = (gumbel(rows.seed, rows.choice, rows.position, 49153).cpu() for rows in (here, there))
    assert torch.allclose(first, second, atol=1e-5)


def test_draws_are_those_of_a_cpu() -> None:
    """Up to rounding at the edge of a nucleus and between scores that nearly tie."""
    count = 256
    logits = 3 * torch.randn(count, 5000, generator=torch.Generator().manual_seed(1))
    params = [SAMPLED if i % 3 else GREEDY for i in range(count)]
    tokens = [draw(logits.to(device), SamplingRows.of(params, range(count), device)).cpu() for device in (CPU, CUDA)]
    assert int((tokens[0] != tokens[1]).sum()) <= 1
    kept = [
        process(logits.to(device), SamplingRows.of([SAMPLED] * count, range(count), device)).isfinite().cpu()
        for device in (CPU, CUDA)
    ]
    assert int((kept[0] ^ kept[1]).sum(dim=-1).max()) <= 1


@pytest.fixture(scope="module")
def latent() -> Llama:
    return random_model(TINY_LATENT, seed=5, dtype=torch.float32, device=CUDA)


@pytest.mark.parametrize("kind", ["model", "latent"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_any_mix_draws_what_plain_sequences_draw(
    kind: str, page_size: int, seed: int, request: pytest.FixtureRequest
) -> None:
    model: Llama = request.getfixturevalue(kind)
    mix_and_check(model, random.Random(seed), page_size, sampled=bool(seed % 2), edited=seed > 1)


def test_a_pool_without_a_size_is_refused_and_one_with_a_size_can_be_measured(model: Llama) -> None:
    with pytest.raises(ConfigError, match=r"engine\.num_pages"):
        Engine(model, config.Engine(), device=CUDA)
    engine = Engine(model, config.Engine(num_pages=40), device=CUDA)
    assert engine.capacity == 40 * engine.page_size
    assert len(step_costs(engine)) == 5
