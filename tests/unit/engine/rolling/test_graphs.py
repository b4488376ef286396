"""Rounds that replay what was captured are the rounds that launch each kernel, also where memory ends."""

from __future__ import annotations

import logging
import random

import pytest
from msgspec.structs import replace

from distspec import config
from distspec.engine import Engine, Rolling
from distspec.models import prefix_layers
from tests.replays import Replays, Short
from tests.rolling import Books, told
from tests.unit.engine.rolling.test_staged import CPU, MODEL, alike, asking, engine

STEPS = 3
ROWS = (4, 2, 1)


def books(layers: int, rows: int) -> tuple[Books, Replays]:
    """Rounds whose graphs have memory for so many rows of the target."""
    replays, options = Replays(), config.Engine(num_pages=400, page_size=4, max_num_seqs=4)
    target = Engine(Short(MODEL, replays, rows), options, device=CPU)
    target.runner.capture = replays
    draft = engine(prefix_layers(MODEL, layers)) if layers else None
    return Books(target, draft, Rolling(target, draft)), replays


def play(here: Books, seed: int, steps: int) -> None:
    """Rows that come and go, of which some ask for all that there is, get what plain steps give."""
    draw, reference = random.Random(seed), engine(MODEL)
    running = []
    for turn in range(12):
        if len(running) < 4 and (turn < 4 or draw.random() < 0.4):
            prompt = [draw.randrange(96) for _ in range(draw.randint(1, 20))]
            # Which rows are greedy is no part of a graph: kernels of a GPU take them together, torch on a CPU does not.
            params = replace(asking(draw, prompt), constraint=None, temperature=0.0)
            running.append((here.enter(prompt, params), prompt, params))
        here.launch(draw.sample(sorted(here.texts), draw.randint(1, len(here.texts))), steps)
        while len(here.flights) > draw.randint(0, 1):
            here.read()
    for text, prompt, params in running:
        found = here.leave(text)
        tokens, said = told(reference, prompt, params, len(found))
        assert found == tokens
        alike(text.said, said[1:])


@pytest.mark.parametrize("layers", [0, 1])
def test_what_was_prepared_is_all_that_rounds_replay(layers: int) -> None:
    here, replays = books(layers, rows=100)
    here.rolling.prepare(STEPS if layers else 0)
    count = replays.count
    play(here, 3, STEPS if layers else 0)
    assert replays.replays >= 12
    assert replays.count == count


def test_the_largest_alone_are_prepared_for_a_rehearsal() -> None:
    here, replays = books(1, rows=100)
    here.rolling.prepare(STEPS, only_largest=True)
    largest = replays.count
    here.rolling.prepare(STEPS)
    assert replays.count == largest * len(ROWS)
    here.rolling.prepare(STEPS)
    assert replays.count == largest * len(ROWS)


@pytest.mark.parametrize("rows", [0, 1, 8])
@pytest.mark.parametrize("layers", [0, 1])
def test_where_memory_ends_large_rounds_are_launched_kernel_by_kernel(
    layers: int, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    here, replays = books(layers, rows)
    steps = STEPS if layers else 0
    with caplog.at_level(logging.WARNING):
        here.rolling.prepare(steps)
    sizes = {count for count in ROWS if f"rounds of {count} rows and {steps} drafts" in caplog.text}
    assert sizes == {count for count in ROWS if count * (steps + 1) > rows}
    warnings = len(caplog.records)
    play(here, 5, steps)
    assert (replays.replays > 0) == (layers > 0 or rows > 0)
    assert len(caplog.records) == warnings, "what has no memory is tried once"
