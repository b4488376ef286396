"""What is captured before requests arrive is all that they replay, whatever they ask for."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from distspec import config
from distspec.attention.triton import TritonBackend
from distspec.drafters.base import Drafter
from distspec.drafters.standalone import StandaloneDrafter
from distspec.engine import Engine
from distspec.protocol.messages import Drop
from distspec.protocol.values import Shape
from tests.desks import CPU, GREEDY, SEEDED, SHAPE, desk, lease, model, plain, run, stream
from tests.replays import Replays

pytestmark = pytest.mark.needs("interpreter")
STEPS = 2
PROMPT = (1, 2, 3, 4)
TREE = Shape(steps=2, topk=2, width=2, nodes=4, depth=2)
ASKED = [
    replace(GREEDY, max_tokens=5, prompt_tokens=4),
    replace(GREEDY, max_tokens=5, prompt_tokens=4, frequency_penalty=0.5),
    replace(GREEDY, max_tokens=5, prompt_tokens=4, logprobs=2),
    replace(SEEDED, max_tokens=5, prompt_tokens=4),
    replace(SEEDED, max_tokens=5, prompt_tokens=4, logprobs=0),
]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    """Of all engines that are made."""
    found = Replays()
    monkeypatch.setattr("distspec.engine.runner.capturing", lambda device: found)
    monkeypatch.setattr("distspec.engine.runner.choose", lambda *_, **__: (TritonBackend, "planted"))
    return found


def engine(seed: int) -> Engine:
    options = config.Engine(num_pages=60, page_size=4, max_num_seqs=1, max_scratch_nodes=4)
    return Engine(model(seed), options, device=CPU)


def drafter(name: str) -> Drafter | None:
    if name == "none":
        return None
    return StandaloneDrafter(
        engine(1), max_num_batched_tokens=16, max_scratch_nodes=4, max_model_len=SHAPE.max_position
    )


@pytest.mark.parametrize("name", ["none", "standalone"])
def test_no_request_waits_for_a_graph(name: str, replays: Replays) -> None:
    steps = STEPS if name != "none" else 0
    subject = desk(engine(0), drafter(name))
    subject.prepare({0, steps})
    count = replays.count
    shapes = [{"drafts": steps}] * len(ASKED) + [{"shape": TREE, "nodes": 4}] * bool(steps)
    for request, (one, shape) in enumerate(zip([*ASKED, ASKED[0]], shapes, strict=False)):
        replies = [*subject.receive(lease(request, PROMPT, one, **shape)), *run(subject)]
        subject.receive(Drop(request=request, epoch=1))
        # On a GPU greedy rows and others go together, on a CPU they do not: no graph draws here.
        assert one.temperature or stream(replies, request) == plain(PROMPT, one)
    assert replays.count == count
    assert replays.replays > 12
