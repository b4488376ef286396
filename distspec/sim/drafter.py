"""A simulated draft worker: keeps the sequences it is told, and proposes right or wrong at a given rate."""

from __future__ import annotations

from random import Random

from distspec.protocol.messages import ROOT, Draft, Drafted, Drop, Freed, FromWorker, SamplingParams
from distspec.sim.model import ToyModel
from distspec.sim.violation import Violation


class SimDrafter:
    """accept: how often a draft is right. nonsense: how often a reply is garbage."""

    def __init__(self, name: str, model: ToyModel, rng: Random, *, slots: int, accept: float, nonsense: float) -> None:
        self.name, self.model, self.rng = name, model, rng
        self.slots, self.accept, self.nonsense = slots, accept, nonsense
        self.open: dict[int, tuple[list[int], SamplingParams]] = {}
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
        text, params = self.open[message.request]
        tokens = self._propose(list(text), params, message.count)
        if self.rng.random() < self.nonsense:
            tokens = [self.model.vocab + 7] * message.count
        return [
            Drafted(
                request=message.request,
                epoch=message.epoch,
                task=message.task,
                tokens=tuple(tokens),
                parents=tuple(range(ROOT, len(tokens) - 1)),
            )
        ]

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
            self.open[message.request] = [], message.params
        text, _ = self.open[message.request]
        if message.keep > len(text):
            raise Violation(f"{self.name}: keep {message.keep} of {len(text)}")
        text[message.keep :] = message.tokens
        self.waiting.pop(message.request, None)
        self.waiting[message.request] = message

    def _propose(self, text: list[int], params: SamplingParams, count: int) -> list[int]:
        out: list[int] = []
        if self.rng.random() < 0.1:
            count = self.rng.randrange(count + 1)
        for _ in range(count):
            right = self.model.outcome(text, params)
            token = right if self.rng.random() < self.accept else self.rng.randrange(self.model.vocab)
            text.append(token)
            out.append(token)
        return out
