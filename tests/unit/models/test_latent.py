"""Latent attention is one arithmetic, whoever computes what lies between its products."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from distspec.attention import Span
from distspec.attention.sdpa import SdpaBackend
from distspec.kv.pool import KVPool
from distspec.models import ModelConfig
from distspec.models.base import Paged
from distspec.models.latent import LatentAttention, latent_parts
from distspec.models.llama import random_weights
from distspec.models.rope import rope_table, rotation
from tests.shapes import KINDS

CPU = torch.device("cpu")
NODES = ([5], [5, 6], [5, 7], [8])
"""A tree of two roots over five committed tokens."""


def attended(config: ModelConfig, *, fused: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt and then a tree: what is added to the stream for the tree, and all that pages hold by then."""
    assert config.latent is not None
    parts = latent_parts(config, config.latent, "", config.hidden_size)
    own = random_weights(parts, seed=2, dtype=torch.float32, device=CPU)
    layer = LatentAttention(config, config.latent, own, fused=fused)
    pool = KVPool(1, 12, 1, config.head_dim, latent=config.kv_latent, dtype=torch.float32, device=CPU)
    backend, table = SdpaBackend(pool, 4, config.num_heads), rope_table(config)
    read = torch.randn(9, config.hidden_size, generator=torch.Generator().manual_seed(1))
    pages = [2, 0, 1]
    prompt = Span(pages, 5, 5, (), [8, 9, 10, 11, 0])
    tree = Span(pages, 5, 0, NODES, [1, 2, 3, 4])
    for span, rows, positions in ((prompt, read[:5], [0, 1, 2, 3, 4]), (tree, read[5:], [5, 6, 6, 5])):
        plan = backend.plan([span])
        attend = Paged(pool.layers, plan.write, partial(backend.read, plan))
        added = layer(0, rows, rotation(table, torch.tensor(positions)), attend)
    return added, pool.data


@pytest.mark.needs("interpreter")
@pytest.mark.parametrize("kind", ["deepseek v3 yarn", "deepseek v2 lite"])
def test_the_fused_kernel_changes_nothing(kind: str) -> None:
    config = replace(KINDS[kind], num_heads=12)
    for got, want in zip(attended(config, fused=True), attended(config, fused=False), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
