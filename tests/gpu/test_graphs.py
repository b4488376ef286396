"""Steps that replay a CUDA graph are the steps that launch each kernel."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from distspec import config
from distspec.engine import Engine, Segment
from distspec.engine.capture import Captured, Capturing
from distspec.models import random_model
from distspec.models.llama import Llama
from distspec.protocol.values import ROOT, Node, SamplingParams
from tests.shapes import TINY

pytestmark = pytest.mark.needs("gpu")
CUDA = torch.device("cuda")


def made(model: Llama, **options: object) -> Engine:
    chosen = config.Engine(**{"num_pages": 200, "max_num_seqs": 4, "max_scratch_nodes": 40, **options})
    engine = Engine(model, chosen, device=CUDA, taps=(0, 2))
    engine.runner.prepare()
    return engine


def rounds(engine: Engine, seed: int, count: int) -> Iterator[list[int]]:
    """The outcomes of each of `count` steps, with requests joining, leaving and taking trees of up to 40 nodes."""
    draw = random.Random(seed)
    open_: list[int] = []
    ids = iter(range(10**9))
    for _ in range(count):
        if len(open_) < engine.slots and draw.random() < 0.3:
            params = SamplingParams(max_tokens=1, seed=draw.getrandbits(60), temperature=draw.choice([0.0, 1.0]))
            prompt = tuple(draw.randrange(97) for _ in range(draw.randint(1, 90)))
            slot = engine.open((), params, use_cache=False)
            engine.reserve(slot, len(prompt))
            engine.step([Segment(slot, prompt)])
            open_.append(slot)
        chosen = draw.sample(open_, draw.randint(0, len(open_)))
        segments = []
        for slot in chosen:
            nodes: list[Node] = []
            for _ in range(draw.choice([0, 0, 3, 40])):
                parent = draw.choice([ROOT, *(node.id for node in nodes[-4:])])
                nodes.append(Node(id=next(ids), parent=parent, token=draw.randrange(97)))
            engine.reserve(slot, 1 + len(nodes))
            segments.append(Segment(slot, (draw.randrange(97),), tuple(nodes)))
        yield [token for outcome in engine.step(segments) for token in (outcome.root or 0, *outcome.nodes)]
        for segment in segments:
            path = [node.id for node in segment.nodes[:1]]
            engine.commit(segment.slot, path, [node.id for node in segment.nodes[1:]])
            if engine.sequence(segment.slot).length > 400 or draw.random() < 0.1:
                engine.close(segment.slot, keep=False)
                open_.remove(segment.slot)
        engine.check()
    for slot in open_:
        engine.close(slot, keep=False)


@pytest.mark.parametrize("page_size", [1, 16])
def test_tokens_and_features_are_those_of_steps_without_graphs(page_size: int) -> None:
    model = random_model(TINY, seed=5, dtype=torch.float32, device=CUDA)
    options = {"page_size": page_size, "num_pages": 3200 // page_size}
    with_graphs, without = made(model, **options), made(model, **options, cuda_graphs=False)
    assert without.runner.graphs is None
    assert list(rounds(with_graphs, 3, 120)) == list(rounds(without, 3, 120))
    assert with_graphs.runner.graphs is not None
    assert with_graphs.runner.graphs.last is not None
    torch.testing.assert_close(with_graphs.pool.features[:-1], without.pool.features[:-1], atol=1e-3, rtol=1e-3)


def test_thousands_of_rounds_leak_nothing() -> None:
    engine = made(random_model(TINY, seed=5, dtype=torch.bfloat16, device=CUDA))
    for _ in rounds(engine, 4, 300):
        pass
    before = torch.cuda.memory_allocated()
    for _ in rounds(engine, 5, 2000):
        pass
    assert torch.cuda.memory_allocated() == before
    assert engine.books.allocator.free == 200


def test_too_little_memory_leaves_out_large_graphs(caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(replace(TINY, vocab_size=300_000), seed=5, dtype=torch.bfloat16, device=CUDA)
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    # The logits of 160 rows take 200 MB, twice while a graph computes them.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 500 * 2**20) / total)
    try:
        with caplog.at_level(logging.WARNING):
            engine = made(model)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "out of memory" in caplog.text
    assert engine.runner.graphs is not None
    assert 0 < max(bucket.rows for bucket in engine.runner.graphs.captured) < 256
    for _ in rounds(engine, 6, 40):
        pass


def test_an_engine_that_is_collected_does_not_end_a_capture() -> None:
    """Its graphs cannot be let go of meanwhile in the same thread."""
    cycle: list[object] = [captured_add()]
    cycle.append(cycle)
    del cycle

    def compute() -> torch.Tensor:
        _ = [[] for _ in range(1000)]  # enough for a collection, if there were any
        return torch.ones(4, device=CUDA) + 1

    before = gc.get_threshold()
    gc.set_threshold(100, 1, 1)
    try:
        found = Capturing(CUDA)(compute)
    finally:
        gc.set_threshold(*before)
    found.replay()
    assert found.result.tolist() == [2] * 4


def captured_add() -> Captured[torch.Tensor]:
    return Capturing(CUDA)(lambda: torch.ones(4, device=CUDA) + 1)


def test_a_capture_that_failed_leaves_the_stream_as_it_was() -> None:
    """Else all that this thread launches later goes to the stream of captures, past what others wait for."""
    calls = iter(range(2))

    def compute() -> None:
        if next(calls):
            torch.cuda.current_stream().synchronize()  # ends a capture, as an allocator does that is out of memory

    before = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        Capturing(CUDA)(compute)
    assert torch.cuda.current_stream() == before
