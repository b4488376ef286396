"""Rounds that are launched before the last one is read give the tokens of plain steps."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec import config
from distspec.engine import Engine, Rolling
from distspec.models import prefix_layers, random_model
from distspec.models.llama import Llama
from distspec.protocol.values import SamplingParams
from tests.rolling import Books, plain
from tests.shapes import TINY

CPU = torch.device("cpu")
MODEL = random_model(TINY, seed=3, dtype=torch.float32, device=CPU)
DRAFTERS = {
    "none": None,
    "itself": MODEL,
    "its first layer": prefix_layers(MODEL, 1),
    "a stranger": random_model(TINY, seed=4, dtype=torch.float32, device=CPU),
}


def engine(model: Llama, **options: object) -> Engine:
    chosen = config.Engine(**{"num_pages": 200, "page_size": 4, "max_num_seqs": 4, **options})
    return Engine(model, chosen, device=CPU)


def books(drafter: str, **options: object) -> Books:
    model, target = DRAFTERS[drafter], engine(MODEL, **options)
    draft = engine(model, **options) if model is not None else None
    return Books(target, draft, Rolling(target, draft))


def random_params(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=1,
        seed=draw.getrandbits(64),
        choice=draw.randrange(3),
        temperature=draw.choice([0.0, 0.5, 1.0]),
        top_k=draw.choice([0, 0, 5]),
        top_p=draw.choice([1.0, 0.8]),
        min_p=draw.choice([0.0, 0.05]),
    )


@settings(max_examples=12)
@given(st.integers(0, 2**32), st.sampled_from(list(DRAFTERS)), st.sampled_from([1, 4, 16]))
def test_rows_that_come_and_go_get_the_tokens_of_plain_steps(seed: int, drafter: str, page_size: int) -> None:
    draw = random.Random(seed)
    here = books(drafter, page_size=page_size, num_pages=1600 // page_size)
    reference = engine(MODEL)
    running: list[tuple[object, list[int], SamplingParams]] = []
    for _ in range(16):
        if len(running) < 4 and draw.random() < 0.4:
            prompt, params = [draw.randrange(97) for _ in range(draw.randint(1, 30))], random_params(draw)
            running.append((here.enter(prompt, params), prompt, params))
        if running and draw.random() < 0.15:
            text, prompt, params = running.pop(draw.randrange(len(running)))
            found = here.leave(text)
            assert found == plain(reference, prompt, params, len(found))
            here.target.check()
        slots = draw.sample(sorted(here.texts), draw.randint(0, len(here.texts)))
        if slots:
            here.launch(slots, draw.randint(0, 4) if drafter != "none" else 0)
        while len(here.flights) > draw.randint(0, 2):
            here.read()
    for text, prompt, params in running:
        found = here.leave(text)
        assert found == plain(reference, prompt, params, len(found))
    for own in filter(None, (here.target, here.drafter)):
        own.check()
        assert own.books.allocator.free == 1600 // page_size


def test_a_good_drafter_is_believed() -> None:
    """Every draft of the model itself is accepted, also after a round that accepted all of the last one."""
    here = books("itself")
    here.enter([5, 6, 7], SamplingParams(max_tokens=1, temperature=0.0))
    for _ in range(5):
        here.launch([0], 3)
        here.read()
    assert len(here.texts[0].tokens) == 4 + 5 * 4


def test_what_has_no_room_is_refused_and_nothing_changes() -> None:
    here = books("itself", num_pages=40, max_num_seqs=1)
    text = here.enter([5, 6, 7], SamplingParams(max_tokens=1, temperature=0.0))
    with pytest.raises(ValueError, match="may grow to 8 tokens, there is room for 4"):
        here.rolling.launch([text.slot], 4)
    here.launch([text.slot], 4)
    assert here.rolling.reach(text.slot, 0) == 4 + 5
    with pytest.raises(ValueError, match="may grow"):
        here.rolling.launch([text.slot], 4)
    here.read()
    assert here.rolling.reach(text.slot, 0) == len(text.tokens)
    while here.rolling.reach(text.slot, 4) <= here.target.max_model_len:
        here.launch([text.slot], 4)
        here.read()
    with pytest.raises(ValueError, match="room for"):
        here.launch([text.slot], 4)
