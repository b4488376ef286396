"""A fleet on two GPUs: the prompt is computed on one, its KV crosses by NCCL, and decoding goes on on the other.

In float32 its tokens are those of the plain target on a CPU, whoever drafts and verifies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distspec.config import load
from distspec.models import random_model, save_pretrained
from distspec.models.llama import Llama
from distspec.protocol.values import SamplingParams, SpeculationChoice
from distspec.workers import fleet as fleets
from distspec.workers.client import Client
from distspec.workers.fleet import FleetHandle
from tests.shapes import LLAMA
from tests.teacher import excused, plain

pytestmark = pytest.mark.needs("gpu2")

SHAPE = replace(
    LLAMA,
    num_layers=4,
    hidden_size=256,
    intermediate_size=512,
    num_heads=8,
    head_dim=32,
    vocab_size=997,
    max_position=1024,
    tie_embeddings=True,
)
PROMPTS = [tuple((11 * i + 5 * j) % 997 for j in range(4 + 60 * i)) for i in range(4)]


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_model(SHAPE, seed=3, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def fleet(model: Llama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetHandle]:
    import ray

    folder: Path = tmp_path_factory.mktemp("model")
    save_pretrained(model, folder)
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    tree = {
        "name": "gpus",
        "model": {"name": str(folder)},
        "engine": {"num_pages": 512, "page_size": 16, "device": "cuda"},
        "transfer": "nccl",
        "pools": {
            "prefill": {"replicas": 1, "num_gpus": 1},
            "decode": {"replicas": 1, "num_gpus": 1},
            "draft": {"replicas": 1},
        },
    }
    handle = fleets.launch(load(tree))
    yield handle
    handle.shutdown()
    ray.shutdown()


async def _tokens(client: Client, prompt: tuple[int, ...], params: SamplingParams, policy: str) -> list[int]:
    out: list[int] = []
    async for output in client.submit(prompt, params, SpeculationChoice(policy=policy)):
        out += output.tokens
    return out


async def _all(fleet: FleetHandle, params: SamplingParams, policy: str) -> tuple[list[list[int]], dict[str, int]]:
    client = fleet.client()
    await client.start()
    try:
        tokens = await asyncio.gather(*(_tokens(client, prompt, params, policy) for prompt in PROMPTS))
        return list(tokens), (await fleet.status())["counters"]
    finally:
        await client.close()


@pytest.mark.parametrize("policy", ["ar", "sd", "dsi"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_kv_crosses_by_nccl_and_tokens_are_the_plain_ones(
    fleet: FleetHandle, model: Llama, policy: str, temperature: float
) -> None:
    params = SamplingParams(max_tokens=48, seed=7, temperature=temperature)
    outputs, counters = asyncio.run(_all(fleet, params, policy))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        if output != plain(model, prompt, params)[0]:
            assert excused(model, prompt, output, params)
    assert not counters.get("transfers_lost")
    assert not counters.get("requeued")
