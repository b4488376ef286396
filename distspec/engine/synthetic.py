"""An engine that computes all it is asked and then says something else: outcomes by a hash.

For benchmarks on random weights, see distspec.synthetic. Knows where each outcome stands. Does not know how often a
drafter is right about it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from distspec import synthetic
from distspec.engine.batch import Outcome, Segment
from distspec.engine.engine import Engine


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
