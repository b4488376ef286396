"""What crosses from one target worker to another is all that their engines keep of a position."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch

from distspec import config
from distspec.engine import Engine
from distspec.protocol.messages import Message, Received, ReceiveKV, SendKV, Verdict
from distspec.rounds.desk import Desk
from distspec.transfer.base import End
from distspec.workers.compute import Later
from distspec.workers.target import TargetWork
from tests.desks import CPU, GREEDY, Ticks, extend, model
from tests.wire import Port, Wire

PROMPT = tuple(i * 7 % 11 for i in range(53))


class Worker:
    """A target worker on a wire; `said` is what its transport's actions answered."""

    def __init__(self, wire: Wire, name: str, page_size: int, taps: tuple[int, ...]) -> None:
        options = config.Engine(page_size=page_size, num_pages=256 // page_size, max_scratch_nodes=8, max_num_seqs=2)
        self.engine = Engine(model(), options, device=CPU, max_model_len=100, taps=taps)
        desk = Desk(self.engine, None, max_num_batched_tokens=20, clock=Ticks())
        self.said: list[Message] = []
        self.port = Port(wire, End(name, 1))
        self.work = TargetWork(self.engine, desk, self.port, self._later)

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
