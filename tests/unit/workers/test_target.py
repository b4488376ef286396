"""What crosses from one target worker to another is all that their engines keep of a position; to a draft worker, the
features of a text, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from random import Random

import pytest
import torch
from msgspec.structs import replace

from distspec import config
from distspec.engine import Engine
from distspec.engine.batch import Batch
from distspec.models import Taps
from distspec.protocol.messages import (
    Drop,
    Extend,
    Freed,
    Message,
    Received,
    ReceiveKV,
    Refused,
    SendFeatures,
    SendKV,
    TransferLost,
    Verdict,
)
from distspec.protocol.values import ROOT, Node
from distspec.rounds.desk import Desk
from distspec.sampling import SamplingRows
from distspec.transfer.base import End, Incoming, Transport
from distspec.transfer.collective import Collective
from distspec.transfer.meeting import Place
from distspec.transfer.window import Region, Window
from distspec.workers.compute import Later
from distspec.workers.target import TargetWork
from tests.causal import Causal
from tests.desks import CPU, GREEDY, Ticks, extend, model
from tests.hostmemory import HostMemory
from tests.wire import Port, Wire

PROMPT = tuple(i * 7 % 11 for i in range(53))


class Worker:
    """A target worker on a wire; `said` is what its transport's actions answered."""

    def __init__(
        self,
        wire: Wire,
        name: str,
        page_size: int,
        taps: tuple[int, ...],
        positions: int = 256,
        transport: Transport | None = None,
    ) -> None:
        options = config.Engine(
            page_size=page_size, num_pages=positions // page_size, max_scratch_nodes=8, max_num_seqs=2
        )
        self.engine = Engine(model(), options, device=CPU, max_model_len=100, taps=taps)
        desk = Desk(self.engine, None, max_num_batched_tokens=20, clock=Ticks())
        self.said: list[Message] = []
        self.port = Port(wire, End(name, 1))
        self.work = TargetWork(self.engine, desk, transport or self.port, self._later)

    def step(self) -> Sequence[Message]:
        replies: list[Message] = []
        while self.work.ready():
            replies += self.work.step()
        return replies

    def _later(self, action: Later) -> None:
        self.said += action()


@pytest.mark.parametrize("taps", [(), (2, 0, 1)])
def test_kv_arrives_together_with_its_features(taps: tuple[int, ...]) -> None:
    wire = Wire(Random(3))
    source, target = Worker(wire, "a", 4, taps), Worker(wire, "b", 16, taps)
    assert source.work.receive(extend(1, PROMPT, GREEDY)) == []
    [first] = source.step()
    assert isinstance(first, Verdict)
    ends = {"request": 1, "epoch": 1, "ticket": 5, "peer_incarnation": 1, "start": 0, "length": len(PROMPT)}
    assert target.work.receive(ReceiveKV(peer="a", tokens=PROMPT, params=GREEDY, **ends)) == []
    assert source.work.receive(SendKV(peer="b", **ends)) == []
    while moves := wire.movable():
        wire.move(*moves[0])

    assert [type(message) for message in target.said] == [Received]
    length = len(PROMPT)
    assert torch.equal(target.engine.gather(0, 0, length), source.engine.gather(0, 0, length))
    assert torch.equal(target.engine.features(0, range(length)), source.engine.features(0, range(length)))
    assert target.engine.features(0, range(length)).shape == (length, len(taps) * model().config.hidden_size)
    assert bool(target.engine.features(0, range(length)).any()) == bool(taps)
    for worker in (source, target):
        worker.work.check()


def carry(wire: Wire) -> None:
    """Until nothing is left that could move."""
    while moves := wire.movable():
        wire.move(*moves[0])


def ticket(prompt: tuple[int, ...], request: int = 1) -> tuple[ReceiveKV, SendKV]:
    ends = {"request": request, "epoch": 1, "ticket": 4 + request, "peer_incarnation": 1, "start": 0}
    ends["length"] = len(prompt)
    return ReceiveKV(peer="a", tokens=prompt, params=GREEDY, **ends), SendKV(peer="b", **ends)


def test_kv_crosses_while_the_rest_of_it_is_computed() -> None:
    """A step of the source computes 20 tokens."""
    wire = Wire(Random(3))
    source, target = Worker(wire, "a", 4, ()), Worker(wire, "b", 16, ())
    receive, send = ticket(PROMPT)
    source.work.receive(extend(1, PROMPT, GREEDY))
    target.work.receive(receive)
    assert source.work.receive(send) == []
    crossed = []
    for _ in range(3):
        carry(wire)
        crossed.append(wire.positions)
        source.work.step()
    assert crossed == [0, 20, 40]
    carry(wire)
    assert [type(message) for message in target.said] == [Received]
    assert torch.equal(target.engine.gather(0, 0, len(PROMPT)), source.engine.gather(0, 0, len(PROMPT)))


def test_the_last_positions_of_a_prompt_may_cross_before_its_outcome_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Worker(Wire(Random(3)), "a", 4, ())
    _, send = ticket(PROMPT)
    source.work.receive(extend(1, PROMPT, GREEDY))
    source.work.receive(send)
    seen = []
    sampling = source.engine._sampling

    def drawn(batch: Batch) -> SamplingRows:
        seen.append(source.port.computed[send.ticket])
        return sampling(batch)

    monkeypatch.setattr(source.engine, "_sampling", drawn)
    source.step()
    assert seen == [len(PROMPT)]


def test_a_drop_in_the_middle_of_a_prefill_ends_its_ticket_and_frees_at_once() -> None:
    wire = Wire(Random(3))
    source, target = Worker(wire, "a", 4, ()), Worker(wire, "b", 16, ())
    receive, send = ticket(PROMPT)
    source.work.receive(extend(1, PROMPT, GREEDY))
    target.work.receive(receive)
    source.work.receive(send)
    source.work.step()
    assert source.work.receive(Drop(request=1, epoch=1)) == [Freed(request=1, epoch=1)]
    carry(wire)
    assert [message.freed for message in target.said if isinstance(message, TransferLost)] == [True]
    for worker in (source, target):
        worker.work.check()


def test_a_prefill_with_a_ticket_that_waits_for_it_is_given_up_for_pages() -> None:
    """Else two that do not fit together would wait for each other's pages, and their tickets for them."""
    wire = Wire(Random(3))
    source, target = Worker(wire, "a", 4, (), positions=116), Worker(wire, "b", 16, ())
    prompts = tuple(i % 11 for i in range(60)), tuple(i % 7 for i in range(60))
    for request, prompt in enumerate(prompts, 1):
        receive, send = ticket(prompt, request)
        source.work.receive(extend(request, prompt, GREEDY))
        source.work.receive(send)
        target.work.receive(receive)
    said = source.step()
    assert [type(message) for message in said] == [Verdict, Refused]
    carry(wire)
    assert sorted(type(message).__name__ for message in target.said) == ["Received", "TransferLost"]
    for worker in (source, target):
        worker.work.check()


# -- pages that the other worker sees ---------------------------------------------------------------------


class Here(HostMemory):
    """All memory of this process is shared, with itself."""

    def share(self, tensor: torch.Tensor) -> Region:
        return Region(tensor.data_ptr().to_bytes(8, "little"), 0)

    def open(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")

    def close(self, address: int) -> None:
        pass


class Apart(Worker):
    """With a window to its peer, and a thread for that: what its transport wants done waits for `hear`."""

    def __init__(self, name: str, places: dict[str, Place], page_size: int, taps: tuple[int, ...]) -> None:
        make = partial(Window, make_memory=Here)
        self.transport = Collective(name, "127.0.0.1", make, lambda end: places[end.worker], timeout_s=20.0)
        self.transport.reset(1)
        places[name] = self.transport.place
        self._waiting: SimpleQueue[Later] = SimpleQueue()
        super().__init__(Wire(Random(0)), name, page_size, taps, transport=self.transport)

    def hear(self) -> Sequence[Message]:
        return self._waiting.get(timeout=30)()

    def _later(self, action: Later) -> None:
        self._waiting.put(action)


@pytest.fixture
def apart() -> Iterator[Callable[[str, int, tuple[int, ...]], Apart]]:
    """Makes workers that know each other."""
    places: dict[str, Place] = {}
    made: list[Apart] = []

    def make(name: str, page_size: int, taps: tuple[int, ...]) -> Apart:
        made.append(Apart(name, places, page_size, taps))
        return made[-1]

    yield make
    for worker in made:
        worker.transport.shutdown()


@pytest.mark.needs("interpreter")
@pytest.mark.parametrize("taps", [(), (2, 0, 1)])
def test_a_prompt_is_read_from_the_sources_pages_while_it_is_computed(
    apart: Callable[[str, int, tuple[int, ...]], Apart], taps: tuple[int, ...]
) -> None:
    """The second crosses to other pages than it came from: those of the first are held."""
    source, target = apart("a", 4, taps), apart("b", 16, taps)
    for request, prompt in enumerate((PROMPT[:30], PROMPT), 1):
        receive, send = ticket(prompt, request)
        source.work.receive(extend(request, prompt, GREEDY))
        target.work.receive(receive)
        assert source.work.receive(send) == []
        source.step()
        assert [type(message) for message in target.hear()] == [Received]
        assert source.hear() == []
        slot, length = request - 1, len(prompt)
        assert torch.equal(target.engine.gather(slot, 0, length), source.engine.gather(slot, 0, length))
    for worker in (source, target):
        worker.work.check()


@pytest.mark.needs("interpreter")
def test_a_pool_that_keeps_something_else_is_not_read(apart: Callable[[str, int, tuple[int, ...]], Apart]) -> None:
    source, target = apart("a", 4, ()), apart("b", 4, (1,))
    receive, send = ticket(PROMPT)
    source.work.receive(extend(1, PROMPT, GREEDY))
    target.work.receive(receive)
    source.work.receive(send)
    source.step()
    [lost] = target.hear()
    assert isinstance(lost, TransferLost)
    assert "pools differ" in lost.reason
    assert source.hear() == []
    for worker in (source, target):
        worker.work.check()


# -- features for a draft worker -----------------------------------------------------------------------

TAPS = (2, 0)


@torch.inference_mode()
def dense(text: Sequence[int]) -> torch.Tensor:
    """[len(text), F], by one forward without pages."""
    found = Taps(TAPS)
    model().forward(torch.tensor(text), torch.arange(len(text)), Causal(), found)
    return found.features()


class Taker:
    """The end of a ticket at a draft worker."""

    def __init__(self, wire: Wire, message: SendFeatures, width: int) -> None:
        self.found = torch.zeros(message.length, width)
        self.ended: list[str | None] = []
        at = range(message.start, message.start + message.length)
        Port(wire, End(message.peer, message.peer_incarnation)).receive(
            Incoming(
                message.ticket,
                End("a", 1),
                (at,),
                lambda part: self.found[part.start - at.start : part.stop - at.start],
                lambda part, content: None,
                self.ended.append,
            )
        )


def wanted(start: int, length: int, nodes: Sequence[int] = ()) -> SendFeatures:
    return SendFeatures(
        request=1, epoch=1, ticket=5, peer="d", peer_incarnation=1, start=start, length=length, nodes=tuple(nodes)
    )


def judged(source: Worker) -> list[int]:
    """A prompt, then a tree below its end; the second branch of it is what will be committed. Returns its ids."""
    source.work.receive(extend(1, PROMPT, GREEDY))
    source.step()
    tree = [(0, ROOT, 3), (1, ROOT, 4), (2, 1, 5), (3, 0, 5), (4, 2, 6)]
    nodes = tuple(Node(id=id, parent=parent, token=token) for id, parent, token in tree)
    source.work.receive(Extend(request=1, epoch=1, task=2, start=len(PROMPT), tokens=(9,), nodes=nodes))
    source.step()
    return [1, 2, 4]


def commit(source: Worker, ids: Sequence[int]) -> None:
    """The fates that follow a verdict, with work that moves KV and writes over what was left."""
    start = len(PROMPT) + 1 + len(ids)
    nodes = tuple(Node(id=10 + i, parent=ROOT, token=i) for i in range(4))
    message = Extend(
        request=1, epoch=1, task=3, start=start, tokens=(1, 2), nodes=nodes, commit=tuple(ids), drop=(0, 3)
    )
    source.work.receive(message)
    source.step()


@pytest.mark.parametrize("first", [0, len(PROMPT) - 2, len(PROMPT) + 2])
@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_features_of_accepted_nodes_are_sent_whether_or_not_they_are_committed_here(first: int, when: str) -> None:
    wire = Wire(Random(3))
    source = Worker(wire, "a", 4, TAPS)
    ids = judged(source)
    text = (*PROMPT, 9, 4, 5, 6)
    message = wanted(first, len(text) - first, ids)
    if when == "after":
        commit(source, ids)
    taker = Taker(wire, message, 2 * model().config.hidden_size)
    assert source.work.receive(message) == []
    if when == "while":
        commit(source, ids)
    while moves := wire.movable():
        wire.move(*moves[0])
    assert taker.ended == [None]
    torch.testing.assert_close(taker.found, dense(text)[first:], atol=1e-5, rtol=1e-5)
    source.work.check()


def test_a_drop_ends_the_ticket_and_frees_what_it_read() -> None:
    wire = Wire(Random(3))
    source = Worker(wire, "a", 4, TAPS)
    ids = judged(source)
    message = wanted(0, len(PROMPT) + 4, ids)
    taker = Taker(wire, message, 2 * model().config.hidden_size)
    source.work.receive(message)
    wire.move(wire.ports[End("d", 1)], 5)
    free = source.engine.books.allocator.free
    assert source.work.receive(Drop(request=1, epoch=1)) == []
    assert source.step() == [Freed(request=1, epoch=1)]
    assert source.engine.books.allocator.free > free
    while moves := wire.movable():
        wire.move(*moves[0])
    assert taker.ended == ["the link broke"]
    source.work.check()


@pytest.mark.parametrize(
    "message",
    [wanted(0, len(PROMPT) + 2, (77,)), wanted(0, len(PROMPT) + 2, ()), wanted(0, len(PROMPT) + 9, (1, 2, 4))],
    ids=["another node", "no node", "too far"],
)
def test_features_that_are_not_here_are_not_sent(message: SendFeatures) -> None:
    source = Worker(Wire(Random(3)), "a", 4, TAPS)
    judged(source)
    [lost] = source.work.receive(message)
    assert isinstance(lost, TransferLost)
    assert (lost.ticket, lost.freed) == (5, False)
    [unknown] = source.work.receive(replace(message, request=2))
    assert isinstance(unknown, TransferLost)
    assert not source.port.tickets
    source.work.check()
