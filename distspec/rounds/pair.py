"""The round that judges one guess: a token and what may follow it, for throughput at large batch.

Knows what `Round` knows, of the one case without a tree (num_steps=1, topk=1, num_draft_tokens=2). Both rows stand
at the committed end, and one comparison accepts; so its host work is nearly that of plain decoding.
"""

from __future__ import annotations

from distspec.drafters.base import Proposal
from distspec.engine import Engine, Outcome, Segment
from distspec.protocol.messages import Lease
from distspec.protocol.values import SamplingParams, Shape, finish_reason
from distspec.rounds.round import Ended, Round


class Pair(Round):
    """bet: the guess, None without one. drawn: the outcomes after the token and after the bet."""

    def __init__(self, message: Lease, token: int, arrival: int) -> None:
        super().__init__(message, (token,), arrival)
        self.bet: int | None = None
        self.drawn: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.tokens) + (self.bet is not None and not self.drawn)

    def hang(self, proposal: Proposal, most: int, shape: Shape) -> None:
        self.bet = proposal.tokens[0] if proposal.tokens else None
        self.laws = proposal.laws[:1]

    def undraft(self) -> bool:
        had, self.bet = self.bet is not None, None
        return had

    def segment(self, slot: int, rows: int) -> Segment:
        if self.bet is None or rows < 2:
            return Segment(slot, (self.tokens[0],))
        return Segment(slot, (self.tokens[0],), bet=self.bet, laws=self.laws)

    def absorb(self, segment: Segment, outcome: Outcome[int], began_s: float, step: tuple[int, float]) -> None:
        assert outcome.root is not None
        self.tokens.clear()
        self.bet, self.drawn = segment.bet, (outcome.root, *outcome.nodes)
        self.logprobs = outcome.logprobs
        self.began_s, self.step = began_s, step

    def end(self, engine: Engine, slot: int, params: SamplingParams, emitted: int) -> Ended:
        first, logprobs = self.drawn[0], tuple(self.logprobs)
        reason = finish_reason(params, emitted + 1, first)
        if self.bet is None:
            return Ended((first,), 0, 0, reason, logprobs)
        if self.bet != first:
            engine.sequence(slot).retract(1)
            return Ended((first,), 1, 0, reason, logprobs[:1])
        if reason is not None:
            return Ended((first,), 1, 1, reason, logprobs[:1])
        return Ended(self.drawn, 1, 1, finish_reason(params, emitted + 2, self.drawn[1]), logprobs)
