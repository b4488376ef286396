"""Draft models and their drafters on a GPU: as on the CPU in float32, and near it in bfloat16."""

from __future__ import annotations

import pytest
import torch

from distspec import config
from distspec.drafters import DflashDrafter, DraftRow, EagleDrafter
from distspec.models import Target, random_model
from distspec.models.dflash import Dflash
from distspec.models.draft_checkpoint import random_draft
from distspec.protocol.values import SamplingParams, Shape
from tests.featured import ALL, CPU, SHAPE, features

pytestmark = pytest.mark.needs("gpu")
CUDA = torch.device("cuda")
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def drafter(name: str, device: torch.device, dtype: torch.dtype) -> EagleDrafter | DflashDrafter:
    target = random_model(SHAPE, seed=0, dtype=torch.float32, device=CPU)
    moved = {key: weight.to(device, dtype) for key, weight in target.weights.items()}
    model = random_draft(ALL[name], Target.of(type(target)(target.config, moved)), seed=1)
    options = config.Engine(page_size=4, num_pages=400)
    if isinstance(model, Dflash):
        return DflashDrafter(model, options, max_model_len=SHAPE.max_position, device=device)
    return EagleDrafter(model, options, max_model_len=SHAPE.max_position, device=device)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_are_those_of_the_cpu(name: str, temperature: float) -> None:
    """Grown, followed and grown on."""
    shape, params = Shape(steps=4, topk=2, width=2, nodes=16), SamplingParams(max_tokens=9, temperature=temperature)
    text, keep, found = list(TEXT), 0, []
    subjects = [drafter(name, device, torch.float32) for device in (CPU, CUDA)]
    for _ in range(3):
        given = features(text, ALL[name].taps)[keep:]
        row = DraftRow(1, keep, tuple(text[keep:]), shape, params, given)
        ours, theirs = (subject.propose([row])[0] for subject in subjects)
        assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)
        assert ours.scores == pytest.approx(theirs.scores, abs=1e-2)
        keep, text = len(text), [*text, *ours.tokens[:1], 3]
        found.append(len(ours.tokens))
    assert min(found) > 3


@pytest.mark.parametrize("name", ALL)
def test_half_precision_guesses_nearly_the_same(name: str) -> None:
    """Scores of the guesses right after the text."""
    shape, params = Shape(steps=1, topk=16, depth=1), SamplingParams(max_tokens=9, temperature=0.0)
    row = DraftRow(1, 0, tuple(TEXT), shape, params, features(TEXT, ALL[name].taps))
    exact, near = (
        dict(zip(found.tokens, found.scores, strict=True))
        for found in (
            drafter(name, CPU, torch.float32).propose([row])[0],
            drafter(name, CUDA, torch.bfloat16).propose([row])[0],
        )
    )
    both = exact.keys() & near.keys()
    assert len(both) >= 0.7 * len(exact)
    assert max(abs(exact[token] - near[token]) for token in both) < 0.25
