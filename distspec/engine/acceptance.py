"""How a drafter guesses and how the target judges its guesses: one choice, which both must have made alike.

Knows logits, rows, and segments with their drafts. Does not know models, slots, or what becomes of outcomes.

`coupled`: both draw with the same noise, so a guess is right if it is the token that the target draws anyway. `ratio`
and `block`: the drafter draws for itself, and the target keeps what it weighs heavy enough; see sampling.rejection.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

from torch import Tensor

from distspec.engine.batch import Guesses, Segment
from distspec.sampling import SamplingRows, best, draw
from distspec.sampling.rejection import Chain, Drafts, Rule, block, judge, propose, ratio


@dataclass(frozen=True, slots=True)
class Guessed:
    """What may follow each row, on the device. tokens: int64 [rows, most], the best of a row first; scores: float32
    [rows, most], their log-probabilities, -inf of what is no guess. laws: float32 [rows, vocab], what the only one was
    drawn from; None where that does not matter."""

    tokens: Tensor
    scores: Tensor
    laws: Tensor | None = None

    def told(self, tokens: Tensor, scores: Tensor) -> list[Guesses]:
        """By row, from tokens and scores, which may have come to the host meanwhile."""
        laws = self.laws if self.laws is not None else repeat(None)
        found = zip(tokens.tolist(), scores.tolist(), laws, strict=False)
        return [
            Guesses(tuple(pair for pair in zip(ids, logs, strict=True) if pair[1] > -math.inf), law)
            for ids, logs, law in found
        ]


class Acceptance(Protocol):
    """logits: float32 [rows, vocab], edited; rows: how each is to be drawn from."""

    def guess(self, logits: Tensor, rows: SamplingRows, lengths: Iterable[int], most: int) -> Guessed:
        """What a drafter proposes after each row, at most `most` tokens. lengths: of each row's text, as
        far as it is committed, in tokens."""
        ...

    def judge(self, logits: Tensor, rows: SamplingRows, segments: Sequence[Segment]) -> Tensor:
        """int64 [rows]: the outcome after each wanted row of the segments. A draft is accepted if it is the outcome
        before it."""
        ...


class Coupled:
    """The drafter's best tokens under the noise of the target's own draw (arXiv 2408.07978)."""

    def guess(self, logits: Tensor, rows: SamplingRows, lengths: Iterable[int], most: int) -> Guessed:
        return Guessed(*best(logits, rows, min(most, logits.shape[1])))

    def judge(self, logits: Tensor, rows: SamplingRows, segments: Sequence[Segment]) -> Tensor:
        return draw(logits, rows)


class Rejection:
    """One drawn token after each row, and its law, which stays on the device."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def guess(self, logits: Tensor, rows: SamplingRows, lengths: Iterable[int], most: int) -> Guessed:
        tokens, laws = propose(logits, rows, list(lengths))
        scores = laws.gather(1, tokens[:, None])[:, 0].log()
        return Guessed(tokens[:, None], scores[:, None], laws)

    def judge(self, logits: Tensor, rows: SamplingRows, segments: Sequence[Segment]) -> Tensor:
        chains = list(_chains(segments))
        return judge(logits, rows, Drafts.of(chains), self._rule) if chains else draw(logits, rows)


def _chains(segments: Iterable[Segment]) -> Iterable[Chain]:
    """The drafts of each segment, by the wanted rows that judge them."""
    row = 0
    for segment in segments:
        tokens = [node.token for node in segment.nodes] if segment.bet is None else [segment.bet]
        # Where a round takes two steps, the row before its first draft was judged without seeing it.
        seen = len(tokens) + 1 - segment.wanted
        if len(segment.laws) > seen:
            yield Chain(row, tokens[seen:], segment.laws[seen:])
        row += segment.wanted


COUPLED = Coupled()

ACCEPTANCES: dict[str, Acceptance] = {"coupled": COUPLED, "ratio": Rejection(ratio), "block": Rejection(block)}
"""By the name that speculation.acceptance gives them."""
