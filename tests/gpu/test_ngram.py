"""n-gram matching on a GPU: the answers of the host, without waiting for the device, and inside a CUDA graph."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from distspec.config import Ngram
from distspec.drafters.base import DraftRow
from distspec.drafters.matchers import lookup
from distspec.drafters.ngram import NgramDrafter
from distspec.protocol.values import SamplingParams, Shape

pytestmark = pytest.mark.needs("gpu")
CUDA = torch.device("cuda")
PARAMS = SamplingParams(max_tokens=100)


@pytest.mark.parametrize("seed", range(4))
def test_the_drafter_proposes_what_it_does_on_the_host(seed: int) -> None:
    rng = random.Random(seed)
    host, device = (NgramDrafter(Ngram(), max_model_len=2000, device=d) for d in (None, CUDA))
    lengths = dict.fromkeys(range(12), 0)
    for _ in range(30):
        rows = []
        for request in rng.sample(range(12), k=rng.randint(1, 12)):
            keep = lengths[request] if rng.random() < 0.8 else rng.randint(0, lengths[request])
            tokens = tuple(rng.randrange(5) for _ in range(rng.choice([0, 1, 3, 200])))
            shape = Shape(steps=rng.randint(0, 6), topk=rng.randint(1, 4), width=rng.randint(1, 4), nodes=32)
            rows.append(DraftRow(request, keep, tokens, shape, PARAMS))
            lengths[request] = keep + len(tokens)
        assert device.propose(rows) == host.propose(rows)


def _texts(seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(4, (16, 512), generator=rng, dtype=torch.int32), torch.randint(513, (16,), generator=rng)


def _look(texts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    return lookup(texts, lengths, max_n=4, min_n=1, topk=3, count=8)


def test_a_graph_replays_it_over_other_texts() -> None:
    texts, lengths = (part.to(CUDA) for part in _texts(0))
    _look(texts, lengths)  # allocates what the first call of each operation does
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _look(texts, lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runs, sizes = _look(texts, lengths)
    for seed in range(1, 4):
        for buffer, part in zip((texts, lengths), _texts(seed), strict=True):
            buffer.copy_(part)
        graph.replay()
        expected_runs, expected_sizes = _look(*_texts(seed))
        found = expected_sizes > 0
        assert torch.equal(sizes.cpu(), expected_sizes)
        assert torch.equal(runs.cpu()[found], expected_runs[found])
