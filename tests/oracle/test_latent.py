"""A target with latent attention: what holds for others holds for it, on the same fleets and over the same pages."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from distspec import config
from distspec.engine import Engine
from distspec.errors import InvalidValue
from distspec.models import load_model, random_model, save_pretrained
from distspec.models.llama import Llama
from distspec.models.mtp import MtpConfig
from tests import matrix
from tests.matrix import CPU, GREEDY, PAGES, REQUESTS, SHAPE, Answers, Cell, name, serve
from tests.oracle.test_engine import mix_and_check
from tests.oracle.test_matrix import check_that_all_took_part
from tests.shapes import TINY_LATENT
from tests.teacher import plain

pytestmark = pytest.mark.usefixtures("one_thread")

LATENT = replace(TINY_LATENT, model_type="deepseek_v3", vocab_size=SHAPE.vocab_size, max_position=SHAPE.max_position)

CELLS = [
    Cell("ar", 0, "layers", True, 16),
    Cell("sd", 0, "layers", True, 1),
    Cell("sd", 0, "layers", True, 4, "static"),
    Cell("sd", 1, "right", False, 64, "dynamic"),
    Cell("ssd", 1, "random", False, 16, "static"),
    Cell("bvsp", 2, "layers", False, 4, "dynamic"),
    Cell("sd", 0, "mtp", True, 16, "static"),
    Cell("ssd", 1, "mtp", False, 1, "dynamic"),
    Cell("dsi", 2, "eagle3", False, 64),
]
"""Latents in the pages of either side, of both, and on the way between workers; chains that roll, and trees."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """From a checkpoint, as any model comes."""
    folder = tmp_path_factory.mktemp("latent")
    save_pretrained(random_model(LATENT, seed=3, dtype=torch.float32, device=CPU), folder)
    return load_model(str(folder), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def tiny() -> Llama:
    return random_model(TINY_LATENT, seed=5, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def answers(target: Llama) -> Answers:
    return Answers(target, {key: plain(target, prompt, params) for key, (prompt, params) in REQUESTS.items()})


def test_greedy_answers_are_those_of_transformers(target: Llama, answers: Answers, tmp_path: Path) -> None:
    save_pretrained(target, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    compared = [key for key, (_, params) in REQUESTS.items() if params == GREEDY]
    for key in compared:
        prompt, params = REQUESTS[key]
        ids = torch.tensor([prompt])
        out = theirs.generate(ids, max_new_tokens=params.max_tokens, do_sample=False, eos_token_id=None)
        assert out[0, len(prompt) :].tolist() == answers.right[key][0]
    assert len(compared) > 1


@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_the_answers_are_the_plain_targets(
    cell: Cell, target: Llama, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer that looks one token ahead keeps latents too, as the target's."""
    monkeypatch.setitem(matrix.FEATURED, "mtp", MtpConfig(replace(LATENT, num_layers=1), index=LATENT.num_layers))
    fleet = serve(cell.fleet(target, seed=CELLS.index(cell)))
    answers.judge(fleet)
    check_that_all_took_part(cell, fleet)
    assert answers.excused <= answers.tokens // 1000


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(PAGES), st.booleans())
def test_any_mix_of_chunks_tokens_and_trees_draws_what_plain_sequences_draw(
    tiny: Llama, seed: int, page_size: int, sampled: bool
) -> None:
    mix_and_check(tiny, random.Random(seed), page_size, sampled, edited=False)


@pytest.mark.parametrize("backend", ["sdpa", "triton", "flash"])
def test_a_backend_that_knows_no_latents_is_refused(target: Llama, backend: str) -> None:
    options = config.Engine(num_pages=64, attention_backend=backend)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"engine\.attention_backend.*auto or flashinfer or mla"):
        Engine(target, options, device=CPU)
