"""Models that have a seed instead of weights."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from distspec.errors import ConfigError, ModelNotFound
from distspec.models import (
    ModelConfig,
    fingerprint,
    load_model,
    model_folder,
    random_model,
    same_vocabulary,
)
from distspec.models.llama import parameters
from tests.shapes import LLAMA

CPU = torch.device("cpu")


def drawn(folder: Path, seed: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA.to_tree() | {"random_weights": seed}))
    return str(folder)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-8b", 8.03),
        ("llama-1b", 1.236),
        ("qwen3-32b", 32.76),
        ("qwen3-0.6b", 0.596),
        ("deepseek-37b", 37.45),
        ("deepseek-2.6b", 2.607),
    ],
)
def test_shapes_that_ship_have_as_many_parameters_as_their_name_says(name: str, billions: float) -> None:
    config = ModelConfig.from_pretrained(model_folder(f"random:{name}"))
    count = sum(prod(shape) for parts in parameters(config).values() for shape in parts.values())
    assert count / 1e9 == pytest.approx(billions, rel=2e-3)


def test_a_small_shape_that_ships_drafts_for_the_large_one() -> None:
    for large, small in (("llama-8b", "llama-1b"), ("qwen3-32b", "qwen3-0.6b")):
        same_vocabulary(model_folder(f"random:{large}"), model_folder(f"random:{small}"))
    with pytest.raises(ConfigError, match="vocabulary"):
        same_vocabulary(model_folder("random:llama-8b"), model_folder("random:qwen3-0.6b"))


def test_an_unknown_shape_is_refused_with_those_that_ship() -> None:
    with pytest.raises(ModelNotFound, match=r"random:llama-9b.*llama-1b, llama-8b"):
        model_folder("random:llama-9b")


def test_weights_are_drawn_from_the_seed_of_the_folder(tmp_path: Path) -> None:
    names = [drawn(tmp_path / str(i), seed) for i, seed in enumerate((3, 3, 4))]
    models = [load_model(name, dtype=torch.float32, device=CPU) for name in names]
    want = random_model(LLAMA, seed=3, dtype=torch.float32, device=CPU)
    assert all(torch.equal(models[0].weights[name], weight) for name, weight in want.weights.items())
    prints = [fingerprint(name) for name in names]
    assert prints[0] == prints[1] != prints[2]
    assert not torch.equal(models[2].embedding, want.embedding)


@pytest.mark.parametrize("seed", [-1, "three", 1.5, True])
def test_a_seed_that_is_none_is_refused(seed: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="random_weights"):
        model_folder(drawn(tmp_path / "bad", seed))
