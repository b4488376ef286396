"""The engine on a GPU: the same noise and draws as on a CPU, and steps equal to plain sequences."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from distspec import config
from distspec.engine import Engine, Segment
from distspec.errors import ConfigError
from distspec.models import random_model
from distspec.models.llama import Llama
from distspec.protocol.values import SamplingParams
from distspec.sampling import SamplingRows, draw, gumbel, process
from distspec.sampling.noise import uniform
from tests.oracle.test_engine import GREEDY, mix_and_check
from tests.shapes import TINY

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


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_any_mix_draws_what_plain_sequences_draw(model: Llama, page_size: int, seed: int) -> None:
    mix_and_check(model, random.Random(seed), page_size, sampled=bool(seed % 2), edited=seed > 1)


def test_the_pool_takes_what_is_left_of_the_share() -> None:
    shape = replace(TINY, num_layers=16, num_heads=8, num_kv_heads=8, head_dim=64, max_position=8192)
    model = random_model(shape, seed=5, dtype=torch.bfloat16, device=CUDA)
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        Engine(model, config.Engine(gpu_memory_utilization=1e-4), device=CUDA)
    before = torch.cuda.memory_allocated()
    engine = Engine(model, config.Engine(gpu_memory_utilization=0.1, max_num_seqs=4096), device=CUDA)
    assert 0.05 * total < torch.cuda.memory_allocated() - before < 0.1 * total
    slot = engine.open([1], GREEDY)
    engine.reserve(slot, 64)
    assert engine.step([Segment(slot, tuple(range(40)))])[0].root is not None
    assert len(engine.measure()) == 5
