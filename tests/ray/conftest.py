"""One Ray cluster and one tiny model for all tests of real actors; both cost seconds to make."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A local Ray with room for every pool; actors of zero CPUs go where they like."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(address="local", include_dashboard=False, num_cpus=4, log_to_driver=False, namespace="tests")
    yield
    if started:
        ray.shutdown()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, in a folder as a user would have it; no tokenizer."""
    import torch

    from distspec.models import random_model, save_pretrained
    from tests.shapes import TINY

    shape = replace(TINY, tie_embeddings=True, eos_token_ids=(1,))
    folder = tmp_path_factory.mktemp("tiny")
    save_pretrained(random_model(shape, seed=3, dtype=torch.float32, device=torch.device("cpu")), folder)
    return folder
