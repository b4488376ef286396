"""A simulated draft worker: keeps the texts it is told and a tree below each, and guesses right at a given rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from msgspec import structs

from distspec.protocol.messages import Draft, Drafted, Drop, Freed, FromWorker
from distspec.protocol.values import ROOT, SamplingParams
from distspec.sim.model import ToyModel
from distspec.sim.violation import Violation
from distspec.speculation.tree import Tree


@dataclass(slots=True)
class _Text:
    """expanded: nodes that got their guesses; the end of the text is the tree's root."""

    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    tree: Tree = field(default_factory=Tree)
    expanded: set[int] = field(default_factory=set)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.tree.judge(self.tree.root, token)
        self.tree.step()


class SimDrafter:
    """accept: how often a best guess is right. nonsense: how often a reply is garbage."""

    def __init__(self, name: str, model: ToyModel, rng: Random, *, slots: int, accept: float, nonsense: float) -> None:
        self.name, self.model, self.rng = name, model, rng
        self.slots, self.accept, self.nonsense = slots, accept, nonsense
        self.open: dict[int, _Text] = {}
        self.waiting: dict[int, Draft] = {}

    def handle(self, message: object) -> list[FromWorker]:
        """Take one message. A Draft waits for a step; an earlier one of its request gets no answer any more."""
        match message:
            case Draft():
                self._take(message)
                return []
            case Drop():
                return [Freed(request=message.request, epoch=message.epoch)] if self.forget(message.request) else []
        raise Violation(f"{self.name} got {type(message).__name__}")

    def ready(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[FromWorker]:
        """Answer the draft that has waited longest."""
        message = self.waiting.pop(next(iter(self.waiting)))
        text = self.open[message.request]
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

    def forget(self, request: int) -> bool:
        """Whether it was open."""
        self.waiting.pop(request, None)
        return self.open.pop(request, None) is not None

    def check(self) -> None:
        if len(self.open) > self.slots:
            raise Violation(f"{self.name}: {len(self.open)} requests, {self.slots} credits granted")

    def _take(self, message: Draft) -> None:
        if message.request not in self.open:
            if message.keep or message.params is None:
                raise Violation(f"{self.name}: draft {message.request} keeps {message.keep} of nothing")
            self.open[message.request] = _Text(message.params)
        text = self.open[message.request]
        if message.keep != len(text.tokens):
            raise Violation(f"{self.name}: keep {message.keep} of {len(text.tokens)}")
        for token in message.tokens:
            text.append(token)
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
            {"tokens": (0,) * many, "parents": tuple(range(many))},
            {"tokens": (0,) * many, "parents": ()},
            {"tokens": (0,) * 5000, "parents": tuple(range(ROOT, 4999))},
            {"base": reply.base + 1000},
            {"epoch": reply.epoch + 1000},
            {"task": reply.task + 100_000},
            {"tokens": (0,), "parents": (ROOT,), "scores": (float("nan"),)},
        )
        return structs.replace(reply, **self.rng.choice(bad))
