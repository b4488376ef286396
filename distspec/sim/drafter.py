"""A simulated draft worker: keeps the texts it is told and a tree below each, and guesses right at a given rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from msgspec import structs

from distspec.protocol.messages import Draft, Drafted, Drop, Freed, FromWorker, Refused, TransferLost
from distspec.protocol.values import ROOT, SamplingParams
from distspec.sim.fed import Fed
from distspec.sim.model import ToyModel
from distspec.sim.packet import Packet
from distspec.sim.violation import Violation
from distspec.speculation.tree import Tree

BREAKS = 0.2
"""How often a drafter that reads features breaks, times its rate of nonsense."""


@dataclass(slots=True)
class _Text:
    """expanded: nodes that got their guesses; the end of the text is the tree's root. fed: its features."""

    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    tree: Tree = field(default_factory=Tree)
    expanded: set[int] = field(default_factory=set)
    fed: Fed = field(default_factory=Fed)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.tree.judge(self.tree.root, token)
        self.tree.step()


class SimDrafter:
    """accept: how often a best guess is right. nonsense: how often a reply is garbage. reads: it drafts from features,
    which others send it; and as it breaks at times, it gives up the request, whose features it has lost.
    """

    def __init__(
        self,
        name: str,
        model: ToyModel,
        rng: Random,
        *,
        slots: int,
        accept: float,
        nonsense: float,
        reads: bool = False,
    ) -> None:
        self.name, self.model, self.rng = name, model, rng
        self.slots, self.accept, self.nonsense, self.reads = slots, accept, nonsense, reads
        self.open: dict[int, _Text] = {}
        self.waiting: dict[int, Draft] = {}
        self.early: dict[int, Packet] = {}

    def handle(self, message: object) -> list[FromWorker]:
        """Take one message. A Draft waits for a step; an earlier one of its request gets no answer any more."""
        match message:
            case Draft():
                self._take(message)
                return []
            case Drop():
                return [Freed(request=message.request, epoch=message.epoch)] if self.forget(message.request) else []
            case Packet() if self.reads:
                self._packet(message)
                return []
        raise Violation(f"{self.name} got {type(message).__name__}")

    def ready(self) -> bool:
        return bool(self._able())

    def step(self) -> list[FromWorker]:
        """Answer the draft that has waited longest, of those whose features are there."""
        message = self.waiting.pop(self._able()[0])
        text = self.open[message.request]
        if self._needs(message):
            text.fed.check(text.tokens)
            if self.rng.random() < BREAKS * self.nonsense:
                self.forget(message.request)
                return [Refused(request=message.request, epoch=message.epoch, reason="broken", task=message.task)]
        self._grow(text, message)
        _, tokens, parents = text.tree.shape()
        most = len(tokens) if self.rng.random() < 0.9 else self.rng.randrange(len(tokens) + 1)
        reply = Drafted(
            request=message.request,
            epoch=message.epoch,
            task=message.task,
            base=len(text.tokens),
            tokens=tuple(tokens[:most]),
            parents=tuple(parents[:most]),
        )
        return [self._spoil(reply) if self.rng.random() < self.nonsense else reply]

    def lose(self, packet: Packet, is_source: bool) -> list[FromWorker]:
        """A link broke under this ticket; what has not heard of it yet cannot say so (no reply)."""
        text = self.open.get(packet.request)
        if text is None or not text.fed.lose(packet.ticket):
            return []
        return [TransferLost(request=packet.request, epoch=0, ticket=packet.ticket, reason="link")]

    def forget(self, request: int) -> bool:
        """Whether it was open."""
        self.waiting.pop(request, None)
        return self.open.pop(request, None) is not None

    def check(self) -> None:
        if len(self.open) > self.slots:
            raise Violation(f"{self.name}: {len(self.open)} requests, {self.slots} credits granted")

    def _able(self) -> list[int]:
        return [number for number, message in self.waiting.items() if self._can_draft(message)]

    def _can_draft(self, message: Draft) -> bool:
        text = self.open[message.request]
        return not self._needs(message) or len(text.fed.cells) >= len(text.tokens) - 1

    def _needs(self, message: Draft) -> bool:
        """Whether features are needed to answer it."""
        return self.reads and not message.shape.quick

    def _packet(self, packet: Packet) -> None:
        """Features arrive, maybe before the draft that is to wait for them; or after nobody waits any more."""
        text = self.open.get(packet.request)
        self.early[packet.ticket] = packet
        if text is not None:
            text.fed.arrive(packet.ticket, packet.cells)

    def _feed(self, message: Draft, text: _Text) -> None:
        """Await what the draft says will come; all that it needs must be there or on its way."""
        source = message.features
        if source is not None:
            text.fed.expect(source.ticket, source.start, len(text.tokens) - 1)
            if source.ticket in self.early:
                text.fed.arrive(source.ticket, self.early[source.ticket].cells)
        if self._needs(message):
            text.fed.needs(len(text.tokens) - 1)

    def _take(self, message: Draft) -> None:
        if message.request not in self.open:
            if message.keep and self.reads:
                return  # it was given up, and that was said
            if message.keep or message.params is None:
                raise Violation(f"{self.name}: draft {message.request} keeps {message.keep} of nothing")
            self.open[message.request] = _Text(message.params)
        text = self.open[message.request]
        if message.keep != len(text.tokens):
            raise Violation(f"{self.name}: keep {message.keep} of {len(text.tokens)}")
        for token in message.tokens:
            text.append(token)
        self._feed(message, text)
        self.waiting.pop(message.request, None)
        self.waiting[message.request] = message

    def _grow(self, text: _Text, message: Draft) -> None:
        """As a drafter with a model would: step by step the best nodes without children, at times fewer than asked."""
        shape, tree = message.shape, text.tree
        steps = shape.steps if self.rng.random() < 0.9 else self.rng.randrange(shape.steps + 1)
        for _ in range(steps):
            nodes = [tree.root, *(node for _, node in tree.ranked(shape.odds))]
            able = [n for n in nodes if n not in text.expanded and len(tree.path(n)) < shape.depth]
            for node in able[: shape.width]:
                text.expanded.add(node)
                room = shape.nodes - len(tree)
                guesses = self._guesses(text, node, min(shape.topk, room))
                tree.add(node, guesses, [ROOT] * len(guesses))

    def _guesses(self, text: _Text, node: int, most: int) -> list[int]:
        """Distinct tokens: the right one first at the rate `accept`, else anywhere or nowhere."""
        path = [text.tree.token(above) for above in text.tree.path(node)]
        right = self.model.outcome([*text.tokens, *path], text.params)
        others = self.rng.sample(range(self.model.vocab), min(most + 1, self.model.vocab))
        guesses = [token for token in others if token != right]
        at = 0 if self.rng.random() < self.accept else self.rng.randrange(1, most + 2)
        return [*guesses[:at], right, *guesses[at:]][:most]

    def _spoil(self, reply: Drafted) -> Drafted:
        """Garbage of every kind that a reply can be made of."""
        many = max(1, len(reply.tokens))
        bad = (
            {"tokens": (self.model.vocab + 7,) * many, "parents": (ROOT,) * many},
            {"tokens": (-1,) * many, "parents": (ROOT,) * many},
            {"tokens": (0,) * many, "parents": tuple(range(many))},
            {"tokens": (0,) * many, "parents": (ROOT - 1,) * many},
            {"tokens": (0,) * many, "parents": (ROOT,) * many},  # one guess, said again and again: no offence
            {"tokens": (0,) * many, "parents": ()},
            {"tokens": (0,) * 5000, "parents": tuple(range(ROOT, 4999))},
            {"base": reply.base + 1000},
            {"base": 0},
            {"epoch": reply.epoch + 1000},
            {"task": reply.task + 100_000},
            {"tokens": (0,), "parents": (ROOT,), "scores": (float("nan"),)},
            {"tokens": (0,), "parents": (ROOT,), "scores": (float("inf"),)},
            {"scores": (0.0,) * (many + 1)},
        )
        return structs.replace(reply, **self.rng.choice(bad))
