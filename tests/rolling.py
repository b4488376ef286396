"""Books around distspec.engine.Rolling, as short as they can be, and the tokens that plain steps give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distspec.engine import Engine, Flight, Rolling, Segment
from distspec.protocol.values import SamplingParams, TokenLogprobs


def plain(engine: Engine, prompt: Sequence[int], params: SamplingParams, count: int) -> list[int]:
    """`count` tokens after the prompt, one step each."""
    return told(engine, prompt, params, count)[0]


def told(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, count: int
) -> tuple[list[int], list[TokenLogprobs]]:
    """The same, and what is told of them."""
    slot = engine.open((), params, use_cache=False)
    engine.reserve(slot, len(prompt) + count)
    found, said, segment = list[int](), list[TokenLogprobs](), Segment(slot, tuple(prompt))
    while len(found) < count:
        [outcome] = engine.step([segment])
        assert outcome.root is not None
        found.append(outcome.root)
        said += outcome.logprobs
        segment = Segment(slot, (outcome.root,))
    engine.close(slot, keep=False)
    return found, said


@dataclass
class Text:
    """slot, draft: of the engines; tokens: all that is known, the root last; said: what is told of tokens that rounds
    brought."""

    slot: int
    draft: int | None
    tokens: list[int]
    prompt: int
    said: list[TokenLogprobs] = field(default_factory=list)


@dataclass
class Books:
    """Texts that roll. flights: launched and not read, the oldest first."""

    target: Engine
    drafter: Engine | None
    rolling: Rolling
    texts: dict[int, Text] = field(default_factory=dict)
    flights: list[Flight] = field(default_factory=list)

    def enter(self, prompt: Sequence[int], params: SamplingParams, root: int | None = None) -> Text:
        """root None: the token that a step gives."""
        slot = self._filled(self.target, prompt, params)
        draft = self._filled(self.drafter, prompt, params) if self.drafter is not None else None
        if root is None:
            self.target.sequence(slot).retract(1)
            root = self.target.step([Segment(slot, (prompt[-1],))])[0].root
            assert root is not None
        text = Text(slot, draft, [*prompt, root], len(prompt))
        self.texts[slot] = text
        self.rolling.enter(slot, root, draft)
        return text

    def _filled(self, engine: Engine, prompt: Sequence[int], params: SamplingParams) -> int:
        slot = engine.open((), params, use_cache=False)
        engine.reserve(slot, len(prompt))
        engine.step([Segment(slot, tuple(prompt), want=False)])
        return slot

    def launch(self, slots: Sequence[int], steps: int) -> None:
        """Where the host has a part in a row, all that is in flight is read meanwhile."""
        for slot in slots:
            self._reserve(self.target, slot, slot, steps)
            draft = self.texts[slot].draft
            if self.drafter is not None and draft is not None:
                self._reserve(self.drafter, draft, slot, steps)
        asks = [self.target.is_edited(slot) or self.target.params(slot).logprobs is not None for slot in slots]
        if not any(asks):
            self.flights.append(self.rolling.launch(slots, steps))
            return
        begun = self.rolling.begin(slots, steps)
        while self.flights:
            self.read()
        self.flights.append(self.rolling.finish(begun, slots))

    def _reserve(self, engine: Engine, own: int, slot: int, steps: int) -> None:
        engine.reserve(own, self.rolling.reach(slot, steps) - engine.sequence(own).length)

    def read(self) -> None:
        """The oldest flight, into the books of those that are still here."""
        flight = self.flights.pop(0)
        for slot, tokens, said in zip(flight.slots, flight.read(), flight.logprobs, strict=True):
            if slot in self.texts:
                text = self.texts[slot]
                text.tokens += tokens
                text.said += said
                self._book(self.target, slot, slot, text.tokens[:-1])
                if self.drafter is not None and text.draft is not None:
                    self._book(self.drafter, text.draft, slot, text.tokens[:-2])

    def _book(self, engine: Engine, own: int, slot: int, computed: Sequence[int]) -> None:
        """Give back what no round in flight can reach, so that others get it."""
        sequence = engine.sequence(own)
        sequence.append(computed[sequence.length :])
        sequence.trim(max(0, self.rolling.reach(slot, 0) - sequence.length))

    def leave(self, text: Text) -> list[int]:
        """What followed the prompt. Reads all that is in flight first."""
        while self.flights:
            self.read()
        del self.texts[text.slot]
        self.rolling.leave(text.slot)
        self.target.close(text.slot, keep=False)
        if self.drafter is not None and text.draft is not None:
            self.drafter.close(text.draft, keep=False)
        return text.tokens[text.prompt :]
