"""Random schedules of one desk against a coordinator that is simple enough to be right.

The coordinator knows the true tokens, sends what the protocol allows in any order, and holds the desk to it:
outcomes are those of plain decoding, streams have no gap, each opening ends once, each Extend is answered
once, and pages balance after every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from distspec.drafters.base import Drafter
from distspec.protocol.messages import (
    Drop,
    Extend,
    Fault,
    Freed,
    Lease,
    Progress,
    Refused,
    Revoke,
    Revoked,
    Verdict,
    Withdraw,
)
from distspec.protocol.values import ROOT, Node, SamplingParams, Shape, finish_reason
from distspec.rounds import Desk, Reply
from tests.chain import wish
from tests.desks import (
    GREEDY,
    SHAPE,
    Guess,
    bushy,
    desk,
    engine,
    guard,
    model,
    next_token,
    ngram,
    standalone,
)

PREFIXES = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 9), (8,))


@dataclass
class Stream:
    """One request as the coordinator sees it. text: committed; its first `prompt` tokens are no output.

    computed: tokens of it that the desk will hold KV of. nodes: live ones there, id -> (parent, token), parents
    first. withdrawn: nobody waits for its last task. known: outcomes not used yet. commit, dead: fates of nodes that
    the desk was not told.
    """

    number: int
    text: list[int]
    params: SamplingParams
    prompt: int
    state: str = "closed"
    epoch: int = 0
    task: int = 0
    computed: int = 0
    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)
    commit: list[int] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    over: bool = False
    withdrawn: bool = False

    @property
    def emitted(self) -> int:
        return len(self.text) - self.prompt

    def forget(self) -> None:
        """Nothing of it is held by the desk any more."""
        self.computed = 0
        for held in (self.nodes, self.known, self.commit, self.dead):
            held.clear()

    def emit(self, token: int) -> None:
        assert not self.over
        assert token == next_token(model(), tuple(self.text), self.params)
        self.text.append(token)
        self.over = finish_reason(self.params, self.emitted, token) is not None

    def walk(self) -> None:
        """Commit one token by the root's outcome."""
        token = self.known.pop(ROOT)
        self.emit(token)
        heir = next((node for node, (parent, of) in self.nodes.items() if (parent, of) == (ROOT, token)), None)
        for node, (parent, _) in list(self.nodes.items()):
            if node != heir and (heir is None or parent == ROOT):
                self.bury(node)
        if heir is not None:
            del self.nodes[heir]
            self.commit.append(heir)
            self.computed += 1
            self.nodes = {n: (ROOT if parent == heir else parent, of) for n, (parent, of) in self.nodes.items()}
            self.known[ROOT] = self.known.pop(heir)

    def bury(self, top: int) -> None:
        """A node and all below it will never be committed."""
        gone = {top}
        for node, (parent, _) in self.nodes.items():
            if parent in gone:
                gone.add(node)
        for node in gone & self.nodes.keys():
            del self.nodes[node]
            self.known.pop(node, None)
            self.dead.append(node)

    def path(self, node: int) -> tuple[int, ...]:
        tokens = []
        while node != ROOT:
            node, token = self.nodes[node]
            tokens.append(token)
        return (*self.text, *reversed(tokens))


class Coordinator:
    def __init__(self, of: Desk, random: Random) -> None:
        self.desk, self.random = of, random
        self.streams: dict[int, Stream] = {}
        self.ids = 0

    def play(self, turns: int) -> None:
        for _ in range(turns):
            if self.desk.ready() and self.random.random() < 0.6:
                self.step()
            else:
                self.send()
        while self.desk.ready():
            self.step()
        for stream in list(self.streams.values()):
            if stream.state != "closed":
                self.tell(stream, Drop(request=stream.number, epoch=stream.epoch), "dropping")
        while self.desk.ready():
            self.step()
        assert all(stream.state == "closed" for stream in self.streams.values())
        assert not self.desk.ready()

    def step(self) -> None:
        for reply in self.desk.step():
            self.hear(reply)
        self.desk.check()

    def tell(self, stream: Stream, message: Extend | Lease | Withdraw | Revoke | Drop, state: str) -> None:
        stream.state = state
        for reply in self.desk.receive(message):
            self.hear(reply)
        self.desk.check()

    def send(self) -> None:
        stream = self.random.choice(list(self.streams.values()) or [self.new()])
        if self.random.random() < 0.2:
            stream = self.new()
        if stream.state != "closed" and self.random.random() < 0.05:
            self.tell(stream, Drop(request=stream.number, epoch=stream.epoch), "dropping")
        elif stream.state == "computing":
            if self.random.random() < 0.3:
                stream.withdrawn = True
                message = Withdraw(request=stream.number, epoch=stream.epoch, tasks=(stream.task,))
                self.tell(stream, message, "computing")
        elif stream.state == "leased":
            if self.random.random() < 0.3:
                stream.epoch += 1
                self.tell(stream, Revoke(request=stream.number, epoch=stream.epoch), "revoking")
        elif stream.state in ("closed", "open"):
            if stream.state == "closed":
                stream.forget()
                stream.epoch += 1
            stream.epoch += self.random.randrange(2)
            while not stream.over and ROOT in stream.known and self.random.random() < 0.8:
                stream.walk()
            if not stream.over:
                (self.lease if self.random.random() < 0.3 else self.extend)(stream)

    def new(self) -> Stream:
        prefix = self.random.choice(PREFIXES)
        text = [*prefix, *(self.random.randrange(SHAPE.vocab_size) for _ in range(self.random.randrange(8)))]
        params = SamplingParams(
            max_tokens=self.random.randrange(1, 16),
            seed=self.random.randrange(3),
            stop_token_ids=(0,),
            prompt_tokens=len(text),
            logprobs=self.random.choice([None, None, 2]),
        )
        if self.random.random() < 0.5:
            params = wish(self.random, params, SHAPE.vocab_size)
        stream = Stream(len(self.streams) + 1, text, params, len(text))
        self.streams[stream.number] = stream
        return stream

    def lease(self, stream: Stream) -> None:
        while not stream.over and stream.computed == len(stream.text):
            stream.walk()
        if stream.over:
            return
        message = Lease(
            request=stream.number,
            epoch=stream.epoch,
            start=stream.computed,
            tokens=tuple(stream.text[stream.computed :]),
            commit=tuple(stream.commit),
            drop=(*stream.dead, *stream.nodes),
            emitted=stream.emitted,
            **self.rounds(),
            params=stream.params,
        )
        stream.forget()
        self.tell(stream, message, "leased")

    def rounds(self) -> dict[str, Any]:
        """Plain ones, chains or trees; at times more is grown than is judged."""
        steps, topk = self.random.randrange(4), self.random.choice([1, 1, 3])
        if not steps:
            return {}
        return {"shape": Shape(steps=steps, topk=topk, width=topk), "nodes": self.random.randrange(1, 6)}

    def extend(self, stream: Stream) -> None:
        start, tokens = stream.computed, tuple(stream.text[stream.computed :])
        if stream.nodes and self.random.random() < 0.3:
            stream.bury(self.random.choice(list(stream.nodes)))
        nodes = self.grow(stream)
        stream.task += 1
        message = Extend(
            request=stream.number,
            epoch=stream.epoch,
            task=stream.task,
            start=start,
            tokens=tokens,
            nodes=nodes,
            commit=tuple(stream.commit),
            drop=tuple(stream.dead),
            params=stream.params if start == 0 else None,
        )
        stream.commit.clear()
        stream.dead.clear()
        stream.computed = len(stream.text)
        self.tell(stream, message, "computing")

    def grow(self, stream: Stream) -> tuple[Node, ...]:
        """Random nodes, often the right ones."""
        nodes: list[Node] = []
        for _ in range(self.random.randrange(5)):
            parent = self.random.choice([ROOT, *stream.nodes])
            token = next_token(model(), stream.path(parent), stream.params)
            if self.random.random() < 0.3:
                token = self.random.randrange(SHAPE.vocab_size)
            self.ids += 1
            stream.nodes[self.ids] = (parent, token)
            nodes.append(Node(id=self.ids, parent=parent, token=token))
        return tuple(nodes)

    def hear(self, reply: Reply) -> None:
        assert not isinstance(reply, Fault)
        stream = self.streams[reply.request]
        match reply:
            case Refused():
                assert stream.state in ("computing", "leased", "open", "over"), "an opening ends once"
                assert reply.reason in ("pages", "slots")
                assert reply.task == (stream.task if stream.state == "computing" else None)
                stream.state = "closed"
            case Freed():
                assert stream.state == "dropping", "an opening ends once"
                stream.state = "closed"
            case Verdict():
                assert (stream.state, reply.task, reply.epoch) == ("computing", stream.task, stream.epoch)
                stream.state = "open"
                for node, outcome in reply.outcomes:
                    assert outcome == next_token(model(), stream.path(node), stream.params)
                    stream.known[node] = outcome
                assert stream.known.keys() == {ROOT, *stream.nodes} or stream.withdrawn
                for node in [n for n in stream.nodes if n not in stream.known]:
                    stream.bury(node)  # with all below it, which was left out as well
                assert stream.known.keys() == {ROOT, *stream.nodes}
                stream.withdrawn = False
            case Progress():
                assert stream.state in ("leased", "revoking")
                assert reply.start == stream.emitted
                for token in reply.tokens:
                    stream.emit(token)
                assert stream.over == (reply.ended is not None)
                if stream.over and stream.state == "leased":
                    stream.state = "over"
            case Revoked():
                assert (stream.state, reply.length) == ("revoking", stream.emitted)
                stream.state, stream.computed = "open", reply.computed


DRAFTERS: list[Callable[[int], Drafter | None]] = [
    lambda pages: None,
    lambda pages: ngram(),
    lambda pages: Guess(bushy),
    lambda pages: standalone(0, num_pages=pages),
    lambda pages: standalone(1, num_pages=pages),
]


@pytest.mark.parametrize("seed", range(100))
def test_any_schedule_gives_plain_tokens_and_balanced_books(seed: int) -> None:
    """Also where leased rounds roll on the device, one of them in flight or none, whether the host has a part in them
    or not: nobody is given pages that it needs, and the drafter's pages balance too."""
    random = Random(seed)
    page_size = random.choice([1, 4, 16])
    of = engine(page_size, num_pages=random.choice([48, 112, 1600]) // page_size, slots=random.choice([2, 4, 8]))
    drafter = DRAFTERS[seed % len(DRAFTERS)](random.choice([20, 400]))
    subject = desk(of, drafter, budget=random.choice([1, 5, 64]), overlap=random.random() < 0.7)
    guard(subject)
    coordinator = Coordinator(subject, random)
    coordinator.play(turns=150)
    assert {slot.params for slot in of._open.values()} <= {GREEDY}, "nothing is left but who holds what is too much"
