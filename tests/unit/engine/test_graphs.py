"""Steps that replay what was captured are the steps that launch each kernel, also where memory ends."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from msgspec import structs

from distspec import config
from distspec.attention.triton import TritonBackend
from distspec.engine import Engine, Segment, stand_in
from distspec.models import random_model
from distspec.protocol.values import ROOT, Node, SamplingParams
from tests.replays import Replays, Short
from tests.shapes import SMALLEST

pytestmark = pytest.mark.needs("interpreter")
CPU = torch.device("cpu")
MODEL = random_model(SMALLEST, seed=3, dtype=torch.float32, device=CPU)
OPTIONS = config.Engine(num_pages=40, page_size=4, max_num_seqs=2, max_scratch_nodes=3)
ROWS = (8, 4, 2, 1)
Made = Callable[[int], tuple[Engine, Replays]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """An engine whose graphs have memory for so many rows."""

    def make(rows: int) -> tuple[Engine, Replays]:
        replays = Replays()
        monkeypatch.setattr("distspec.engine.runner.capturing", lambda device: replays)
        monkeypatch.setattr("distspec.engine.runner.choose", lambda *_, **__: (TritonBackend, "planted"))
        return Engine(Short(MODEL, replays, rows), OPTIONS, device=CPU), replays

    return make


def outcomes(engine: Engine, seed: int) -> list[int]:
    """Of steps of one or two slots, with and without nodes."""
    draw, found, ids = random.Random(seed), list[int](), iter(range(10**9))
    slots = [engine.open((), SamplingParams(max_tokens=1, seed=seed + i), use_cache=False) for i in range(2)]
    for _ in range(6):
        segments = []
        for slot in slots[: draw.randint(1, 2)]:
            nodes: list[Node] = []
            for _ in range(draw.choice([0, 3])):
                parent = draw.choice([ROOT, *(node.id for node in nodes)])
                nodes.append(Node(id=next(ids), parent=parent, token=draw.randrange(MODEL.config.vocab_size)))
            engine.reserve(slot, 1 + len(nodes))
            segments.append(Segment(slot, (draw.randrange(MODEL.config.vocab_size),), tuple(nodes)))
        found += [token for outcome in engine.step(segments) for token in (outcome.root or 0, *outcome.nodes)]
        for segment in segments:
            engine.commit(segment.slot, (), [node.id for node in segment.nodes])
    for slot in slots:
        engine.close(slot, keep=False)
    return found


plain = partial(Engine, MODEL, structs.replace(OPTIONS, cuda_graphs=False), device=CPU)


def test_outcomes_are_those_of_steps_without_graphs(made: Made) -> None:
    engine, replays = made(100)
    engine.runner.prepare()
    count = replays.count
    assert outcomes(engine, 1) == outcomes(plain(), 1)
    assert replays.replays == 6
    assert replays.count == count, "all was prepared"


def guesses(engine: Engine) -> list[tuple[tuple[int, float], ...]]:
    """Of two steps, the second of which begins with guesses of the first, not in their order, before these are read."""
    slot = engine.open((), SamplingParams(max_tokens=1, seed=5), use_cache=False)
    engine.reserve(slot, 5)
    first = engine.guess([Segment(slot, (4, 9))], 3)
    nodes = tuple(Node(id=id, parent=ROOT, token=token) for id, token in enumerate((stand_in(1), 7, stand_in(0))))
    second = engine.guess([Segment(slot, (), nodes)], 3, first)
    [[one], [three]] = first.read(), second.read()
    assert one.root is not None
    return [one.root.ranked, *(guess.ranked for guess in three.nodes)]


def test_guesses_of_a_step_that_was_not_read_are_tokens_of_the_next(made: Made) -> None:
    engine, replays = made(100)
    for ours, theirs in zip(guesses(engine), guesses(plain()), strict=True):
        assert [token for token, _ in ours] == [token for token, _ in theirs]
        assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-4)
    assert replays.replays == 2


def test_a_step_that_was_not_prepared_captures_its_graph(made: Made) -> None:
    engine, replays = made(100)
    assert engine.runner.graphs is not None
    assert not replays.count
    assert outcomes(engine, 2) == outcomes(plain(), 2)
    assert replays.replays == 6
    assert replays.count == len(engine.runner.graphs.captured) > 0


def test_the_largest_alone_are_prepared_for_a_rehearsal(made: Made) -> None:
    engine, _ = made(100)
    assert engine.runner.graphs is not None
    engine.runner.prepare(only_largest=True)
    assert {bucket.rows for bucket in engine.runner.graphs.captured} == {max(ROWS)}
    engine.runner.prepare()
    assert {bucket.rows for bucket in engine.runner.graphs.captured} == set(ROWS)


@pytest.mark.parametrize("rows", [0, 2, 4])
def test_where_memory_ends_large_steps_are_launched_kernel_by_kernel(
    made: Made, rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine, replays = made(rows)
    assert engine.runner.graphs is not None
    with caplog.at_level(logging.WARNING):
        engine.runner.prepare()
    assert {bucket.rows for bucket in engine.runner.graphs.captured} == {count for count in ROWS if count <= rows}
    assert all((f"steps of {count} rows" in caplog.text) == (count > rows) for count in ROWS)
    warnings = len(caplog.records)
    assert outcomes(engine, 3) == outcomes(plain(), 3)
    assert len(caplog.records) == warnings, "what has no memory is tried once"
    assert (replays.replays > 0) == (rows > 0)
