"""A draft model on a GPU, whose steps begin before the last is read: it proposes what it does on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from distspec import config
from distspec.drafters import DraftRow, Proposal, StandaloneDrafter
from distspec.engine import Engine
from distspec.models import random_model
from distspec.protocol.values import SamplingParams, Shape
from tests.growth import paths
from tests.shapes import TINY

pytestmark = pytest.mark.needs("gpu")

SHAPE = dataclasses.replace(TINY, head_dim=16, vocab_size=300, max_position=512)
TEXT = tuple(range(7, 90))
PARAMS = SamplingParams(max_tokens=99, temperature=1.0, seed=3, stop_token_ids=(5, 6, 7, 8, 9, 10, 11, 12))


def proposals(device: str, cuda_graphs: bool, odds: tuple[float, ...]) -> list[Proposal]:
    """Of three turns, each after the text went on along a path of three nodes."""
    on = torch.device(device)
    options = config.Engine(num_pages=200, max_num_seqs=4, max_scratch_nodes=128, cuda_graphs=cuda_graphs)
    engine = Engine(random_model(SHAPE, seed=0, dtype=torch.float32, device=on), options, device=on)
    subject = StandaloneDrafter(engine, max_num_batched_tokens=64, max_scratch_nodes=128, max_model_len=512)
    text, told, found = TEXT, 0, []
    for steps in (5, 2, 3):
        shape = Shape(steps=steps, topk=3, width=20, nodes=250, odds=odds)
        [proposal] = subject.propose([DraftRow(1, told, text[told:], shape, PARAMS)])
        told, text = len(text), text + next(path for path in paths(proposal) if len(path) == 3)
        found.append(proposal)
    subject.check()
    return found


@pytest.mark.parametrize("odds", [(0.8, 0.1, 0.03), ()], ids=["static", "dynamic"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_it_proposes_what_it_does_on_a_cpu(cuda_graphs: bool, odds: tuple[float, ...]) -> None:
    for ours, theirs in zip(proposals("cuda", cuda_graphs, odds), proposals("cpu", False, odds), strict=True):
        assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)
        assert ours.scores == pytest.approx(theirs.scores, abs=1e-3)
