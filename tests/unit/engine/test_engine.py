from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from distspec import config
from distspec.engine import Engine, Segment
from distspec.engine.measure import step_costs
from distspec.errors import ConfigError, IllegalTransition, InvalidValue, OutOfPages, OutOfSlots
from distspec.models import random_model
from distspec.models.llama import Llama
from distspec.protocol.values import ROOT, Node, SamplingParams
from distspec.sampling.tables import Counts
from tests.shapes import SMALLEST

CPU = torch.device("cpu")
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_model(SMALLEST, seed=1, dtype=torch.float32, device=CPU)


def test_slots_and_pages_are_refused_and_nothing_leaks(model: Llama) -> None:
    engine = Engine(model, config.Engine(page_size=4, num_pages=4, max_num_seqs=2, max_scratch_nodes=4), device=CPU)
    first, second = engine.open([1], PARAMS), engine.open([2], PARAMS)
    with pytest.raises(OutOfSlots):
        engine.open([3], PARAMS)
    engine.reserve(first, 13)
    with pytest.raises(OutOfPages):
        engine.reserve(second, 1)
    engine.check()
    engine.close(first)
    assert engine.open([3], PARAMS) == first
    engine.reserve(second, 16)
    engine.check()


def test_an_opening_that_breaks_takes_no_slot_and_no_page(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory ends; who asked again would find fewer each time, and what the next one asks for is its own."""
    engine = Engine(model, config.Engine(page_size=4, num_pages=8, max_num_seqs=1, max_scratch_nodes=4), device=CPU)
    prompt = tuple(range(9))
    first = engine.open(prompt, PARAMS)
    engine.reserve(first, len(prompt))
    engine.step([Segment(first, prompt)])
    engine.close(first)

    def short(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(Counts, "open", short)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            engine.open(prompt, replace(PARAMS, presence_penalty=1.0))
    slot = engine.open((), PARAMS)
    assert not engine.is_edited(slot)
    engine.reserve(slot, 32)
    engine.check()


def test_a_refused_step_changes_nothing(model: Llama) -> None:
    engine = Engine(model, config.Engine(page_size=4, num_pages=64), device=CPU)
    slots = [engine.open([1], PARAMS) for _ in range(2)]
    for slot in slots:
        engine.reserve(slot, 70)
    good = Segment(slots[0], (1, 2))
    orphan = Segment(slots[1], (1,), (Node(id=0, parent=5, token=1),))
    deep = tuple(Node(id=i, parent=i - 1, token=1) for i in range(10))
    for bad, error in (
        (orphan, IllegalTransition),
        (Segment(slots[1], (1,) * 65), ValueError),
        (Segment(slots[1], (1,) * 55, deep), ValueError),
        (Segment(slots[1], (1,) * 99), ValueError),
        (Segment(slots[0], (3,)), ValueError),
    ):
        with pytest.raises(error):
            engine.step([good, bad])
    assert [engine.sequence(slot).tokens for slot in slots] == [[], []]
    engine.step([good, Segment(slots[1], (1,) * 54, deep)])
    assert [engine.sequence(slot).length for slot in slots] == [2, 54]


def test_nothing_to_do_is_done(model: Llama) -> None:
    engine = Engine(model, config.Engine(), device=CPU)
    slot = engine.open([1], PARAMS)
    assert engine.step([]) == []
    outcome = engine.step([Segment(slot, ())])[0]
    assert (outcome.root, outcome.nodes) == (None, [])


def test_a_prompt_is_shared_while_its_first_request_still_runs(model: Llama) -> None:
    engine = Engine(model, config.Engine(page_size=4), device=CPU)
    prompt = tuple(range(11))
    first = engine.open(prompt, PARAMS)
    engine.reserve(first, 12)
    engine.step([Segment(first, prompt)])
    second = engine.open(prompt, PARAMS)
    assert engine.sequence(second).tokens == list(range(8))
    assert engine.sequence(second).pages == engine.sequence(first).pages[:2]
    engine.check()


def test_nodes_of_the_past_do_not_disturb_what_is_appended(model: Llama) -> None:
    engine = Engine(model, config.Engine(page_size=4), device=CPU)
    slot = engine.open([1], PARAMS)
    engine.reserve(slot, 20)
    engine.step([Segment(slot, (1, 2), (Node(id=0, parent=ROOT, token=3), Node(id=1, parent=0, token=4)))])
    plain = engine.open([9], PARAMS)
    engine.reserve(plain, 20)
    want = engine.step([Segment(plain, (1, 2, 7, 8))])[0].root
    assert engine.step([Segment(slot, (7, 8))])[0].root == want
    assert sorted(engine.sequence(slot).nodes) == [0, 1]
    assert torch.allclose(engine.gather(slot, 0, 4), engine.gather(plain, 0, 4), atol=1e-5)


def test_the_pool_is_sized_from_what_is_configured_or_can_be_used(model: Llama) -> None:
    sized = Engine(model, config.Engine(page_size=16, max_num_seqs=3), device=CPU)
    assert 3 * 64 <= sized.capacity <= 3 * (64 + 64 + 32)
    assert sized.max_model_len == 64
    with pytest.raises(ConfigError, match=r"model\.max_model_len"):
        Engine(model, config.Engine(), device=CPU, max_model_len=65)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("nodes", [1, 7, 16])
def test_the_longest_request_leaves_room_for_scratch_nodes_and_the_seams(
    model: Llama, page_size: int, nodes: int
) -> None:
    options = config.Engine(page_size=page_size, max_scratch_nodes=nodes)
    pages = options.pages_for(33)
    for max_model_len in (None, 33):
        engine = Engine(model, replace(options, num_pages=pages), device=CPU, max_model_len=max_model_len)
        assert 33 <= engine.max_model_len <= engine.capacity - nodes - 2 * page_size
    with pytest.raises(ConfigError, match=rf"engine\.num_pages: got {pages - 1}, need >= {pages} "):
        Engine(model, replace(options, num_pages=pages - 1), device=CPU, max_model_len=33)
    with pytest.raises(ConfigError, match=r"engine\.num_pages"):
        Engine(model, replace(options, num_pages=options.pages_for(1) - 1), device=CPU)


def test_taps_must_be_layers_of_the_model(model: Llama) -> None:
    engine = Engine(model, config.Engine(num_pages=8), device=CPU, taps=(0, 1))
    slot = engine.open([1], PARAMS)
    engine.reserve(slot, 3)
    engine.step([Segment(slot, (5, 6))])
    assert torch.equal(engine.features(slot, [1])[0, : SMALLEST.hidden_size], model.embedding[6])
    for bad in ((-1,), (0, 2)):
        with pytest.raises(InvalidValue, match="taps"):
            Engine(model, config.Engine(num_pages=8), device=CPU, taps=bad)


def test_measuring_leaves_nothing_behind(model: Llama) -> None:
    engine = Engine(model, config.Engine(page_size=4), device=CPU)
    costs = step_costs(engine)
    assert len(costs) == 5
    assert costs[0] == 1
    assert min(costs) > 0
    engine.check()
    assert engine.books.allocator.free * 4 == engine.capacity
    small = config.Engine(page_size=4, num_pages=4, max_scratch_nodes=4)
    assert step_costs(Engine(model, small, device=CPU)) == ()
    assert step_costs(Engine(model, config.Engine(page_size=4), device=CPU, max_model_len=16)) == ()


def breaks(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_what_a_step_that_broke_has_left_is_shared_with_nobody(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = Engine(model, config.Engine(page_size=4), device=CPU), tuple(range(11))
    slot = engine.open(prompt, PARAMS)
    engine.reserve(slot, 12)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "hidden", breaks)
        with pytest.raises(torch.OutOfMemoryError):
            engine.step([Segment(slot, prompt)])
    engine.close(slot)
    assert engine.sequence(engine.open(prompt, PARAMS)).tokens == []
    engine.check()


def test_so_is_what_a_commit_that_broke_did_not_move(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, config.Engine(page_size=4), device=CPU)
    broken = engine.open((1, 2), PARAMS)
    engine.reserve(broken, 20)
    nodes = tuple(Node(id=i, parent=ROOT, token=i) for i in range(4))
    engine.step([Segment(broken, (1, 2, 3), nodes)])
    with monkeypatch.context() as patch:
        patch.setattr(engine.pool, "move", breaks)
        with pytest.raises(torch.OutOfMemoryError):
            engine.commit(broken, [3], [0, 1, 2])
    engine.close(broken)
    again = engine.open((1, 2, 3, 3, 4), PARAMS)
    assert engine.sequence(again).length == 0
    engine.check()
