"""Kernels that start while the one before them ends, and weights that are read ahead of their turn."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from distspec.attention import Places
from distspec.attention.triton import TritonBackend
from distspec.kernels.launch import early, one_by_one
from distspec.kernels.sample import draw_whole
from distspec.kv.pool import KVPool
from distspec.models import random_model
from distspec.models.base import Paged
from distspec.models.llama import Llama
from distspec.sampling import GREEDY_BELOW
from tests.gpu.test_kernels import CUDA, SHAPE

pytestmark = pytest.mark.needs("gpu")
LENGTH, PAGE, STEPS = 90, 16, 3


class Drafts:
    """Some steps in one graph, each of which goes on from the tokens of the step before, over pages of their own."""

    def __init__(self, model: Llama, rows: int) -> None:
        pages, generator = -(-(LENGTH + STEPS) // PAGE), torch.Generator(CUDA).manual_seed(2)
        self.pool = KVPool(
            SHAPE.num_layers,
            (rows + 1) * pages * PAGE,
            SHAPE.num_kv_heads,
            SHAPE.head_dim,
            dtype=torch.bfloat16,
            device=CUDA,
        )
        self.pool.data.normal_(generator=generator)
        self.model, self.backend = model, TritonBackend(self.pool, PAGE, SHAPE.num_heads)
        each = torch.arange(rows, device=CUDA)
        tables = torch.arange((rows + 1) * pages, device=CUDA).view(rows + 1, pages)
        self.places = Places(tables, torch.full((rows + 1,), LENGTH, device=CUDA), each, 0)
        self.positions = [torch.full((rows,), LENGTH + i, device=CUDA) for i in range(STEPS)]
        self.keys = [torch.stack((each, each, each + i), dim=1) for i in range(STEPS)]
        self.warm = torch.ones(rows, device=CUDA)
        self.first = torch.zeros(rows, dtype=torch.int64, device=CUDA)
        self.graph = torch.cuda.CUDAGraph()
        self.run()  # compiled and loaded outside of the graph
        with torch.cuda.graph(self.graph):
            self.found = self.run()

    def run(self) -> tuple[Tensor, Tensor]:
        """Tokens of all steps, and logits of the last."""
        tokens, drawn = self.first, []
        for plan, positions, keys in zip(
            self.backend.steps(self.places, STEPS), self.positions, self.keys, strict=True
        ):
            paged = Paged(self.pool.layers, plan.write, partial(self.backend.read, plan))
            logits = self.model.logits(self.model.forward(tokens, positions, paged))
            tokens = draw_whole(logits, self.warm, keys, GREEDY_BELOW)
            drawn.append(tokens)
        return torch.stack(drawn), logits


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
@torch.inference_mode()
def test_early_launches_change_nothing(rows: int) -> None:
    """To the bit, over many replays from ever other tokens."""
    assert early()["EARLY"]
    model = random_model(SHAPE, seed=4, dtype=torch.bfloat16, device=CUDA)
    overlapped = Drafts(model, rows)
    with one_by_one():
        apart = Drafts(model, rows)
    for seed in range(500):
        first = torch.randint(SHAPE.vocab_size, (rows,), generator=torch.Generator().manual_seed(seed))
        for each in (overlapped, apart):
            each.first.copy_(first)
            each.graph.replay()
        assert torch.equal(overlapped.found[0], apart.found[0])
        assert torch.equal(overlapped.found[1], apart.found[1])
    assert torch.equal(overlapped.pool.data, apart.pool.data)
