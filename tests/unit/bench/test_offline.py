"""Both sides of the comparison do the same work: the same number of the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distspec.bench.offline import BATCHES, Side, compare, desk_side, equal_share, transformers_side
from distspec.config import Config, load
from distspec.models import random_model, save_pretrained
from tests.shapes import LLAMA

PROMPTS = [[(5 * i + 3 * j) % LLAMA.vocab_size for j in range(4 + i)] for i in range(8)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder: Path = tmp_path_factory.mktemp("model")
    save_pretrained(random_model(LLAMA, seed=1, dtype=torch.float32, device=torch.device("cpu")), folder)
    return load({"model": {"name": str(folder)}, "engine": {"num_pages": 64}, "speculation": {"policy": "ar"}})


@pytest.mark.parametrize("batch", BATCHES)
def test_every_side_gives_the_tokens_that_were_asked_for(config: Config, batch: int) -> None:
    ours, theirs = desk_side(config), transformers_side(config)
    for tokens in (2, 12, 12):
        answers = ours(PROMPTS[:batch], tokens)
        assert [len(answer) for answer in answers] == [tokens] * batch
        assert answers == theirs(PROMPTS[:batch], tokens)


def test_a_rate_is_tokens_by_time_and_the_reference_is_the_peers() -> None:
    ticks = iter([0.0, 2.0, 2.0, 6.0, 0.0, 2.0, 2.0, 6.0, 0.0, 9.0, 9.0, 99.0])

    def says(token: int) -> Side:
        return lambda prompts, tokens: [[token] * tokens for _ in prompts]

    sides = {"ar": says(1)}
    [one] = compare(sides, says(2), PROMPTS[:2], tokens=10, repetitions=3, context={}, clock=lambda: next(ticks))
    assert (one.name, one.value, one.reference, one.ratio) == ("offline/ar/b2", 10.0, 5.0, 2.0)
    assert one.context["equal_tokens"] == 0.0


def test_equal_tokens_count_up_to_the_first_difference() -> None:
    assert equal_share([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]]) == 6 / 8
