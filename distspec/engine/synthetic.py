"""Engines that compute all they are asked and then say something else: outcomes, or guesses of them, by a hash.

For benchmarks on random weights, see distspec.synthetic. Knows where each outcome stands. Does not know trees, or who
judges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from distspec import config, synthetic
from distspec.engine.batch import Guesses, Outcome, Segment
from distspec.engine.engine import Engine, Guessing
from distspec.models.base import Model
from distspec.protocol.odds import share


class SyntheticEngine(Engine):
    """See Engine; every forward runs in full, and the drawing too."""

    def step(self, segments: Seq[Segment]) -> list[Outcome[int]]:
        return [self._instead(*pair) for pair in zip(segments, super().step(segments), strict=True)]

    def _instead(self, segment: Segment, outcome: Outcome[int]) -> Outcome[int]:
        """The same outcomes, with hashes for tokens; their logprobs are of what was drawn. The sequence holds the
        segment by now, its bet too."""
        sequence = self.sequence(segment.slot)
        root = sequence.length - (segment.bet is not None)
        nodes = [(sequence.position(node.id) + 1, node.token) for node in segment.nodes]
        if segment.bet is not None:
            nodes = [(sequence.length, segment.bet)]
        return Outcome(
            root=None if outcome.root is None else self._token(segment.slot, root, segment.tokens[-1]),
            nodes=[self._token(segment.slot, position, last) for position, last in nodes],
            logprobs=outcome.logprobs,
            given=outcome.given,
        )

    def _token(self, slot: int, position: int, last: int) -> int:
        params = self._open[slot].params
        return synthetic.outcome(params.seed, params.choice, position, last, self.model.config.vocab_size)


class SyntheticGuesser(Engine):
    """A drafter's. odds[r]: how often its r-th guess of what a SyntheticEngine draws is right, which is also the
    probability that it gives it. What is accepted keeps its KV, as a real drafter's does."""

    def __init__(self, model: Model, options: config.Engine, *, odds: Seq[float], **others: Any) -> None:
        super().__init__(model, options, **others)
        self._odds = tuple(odds)

    def guess(self, segments: Seq[Segment], most: int, before: Guessing | None = None) -> Guessing:
        begun = super().guess(segments, most, before)
        scores = [math.log(max(share(rank, self._odds), 1e-9)) for rank in range(most)]

        def read() -> list[Outcome[Guesses]]:
            return [self._instead(*pair, scores) for pair in zip(segments, begun.read(), strict=True)]

        return Guessing(begun.tokens, read)

    def _instead(self, segment: Segment, outcome: Outcome[Guesses], scores: Seq[float]) -> Outcome[Guesses]:
        """As many guesses as ever, whatever the model's own were."""
        sequence = self.sequence(segment.slot)
        nodes = ((sequence.position(node.id) + 1, sequence.token(node.id)) for node in segment.nodes)
        root = () if outcome.root is None else ((sequence.length, segment.tokens[-1]),)
        made = list(self._guesses(segment.slot, (*root, *nodes), scores))
        return Outcome(root=made[0] if root else None, nodes=made[len(root) :])

    def _guesses(self, slot: int, places: Iterable[tuple[int, int]], scores: Seq[float]) -> Iterator[Guesses]:
        """After each (position of the guess, token before it)."""
        params, vocab, most = self.params(slot), self.model.config.vocab_size, len(scores)
        for position, last in places:
            tokens = synthetic.guesses(params.seed, params.choice, position, last, vocab, self._odds, most)
            yield Guesses(tuple(zip(tokens, scores, strict=False)))
