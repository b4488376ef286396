"""How often a guess is right, by its rank, learned from what the walk kept.

Knows ranks and counts. Does not know tokens, trees, how deep a guess hung or who drafted; one class of requests (say
greedy ones of one drafter) has one `Acceptance`, whoever keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence

PRIOR = (0.6, 0.3, 0.18, 0.13, 0.1)
"""How often a guess of each rank is taken to be right, where those before it were wrong, until it is known."""

PRIOR_WEIGHT = 10.0
"""Observations that the prior counts as."""

HALF_LIFE = 2000
"""Observations of a rank after which one of them counts half."""


class Acceptance:
    """Decaying counts, so that drift is followed.

    An observation is one node whose outcome is known, on the committed path. rank: of the child that was right, or
    None. children: how many there were; ranks beyond were not tried and say nothing.

    A rank is tried where those before it were wrong. So the odds of all ranks never sum to more than 1; what is known
    of later ones stays true when the first gets better or worse, and is kept while nobody tries them.
    """

    def __init__(self, prior: Sequence[float] = PRIOR, half_life: float = HALF_LIFE) -> None:
        self.prior = tuple(prior)
        ranks = len(self.prior)
        self._growth = 2 ** (1 / half_life)
        self._tried, self._right, self._weight = [0.0] * ranks, [0.0] * ranks, [1.0] * ranks
        self._odds: tuple[float, ...] | None = None

    def observe(self, rank: int | None, children: int) -> None:
        """Weights grow instead of all counts shrinking; they are scaled back before they overflow."""
        self._odds = None
        known = min(children, len(self.prior))
        right = known if rank is None else rank
        for i in range(min(right + 1, known)):
            self._weight[i] *= self._growth
            self._tried[i] += self._weight[i]
            self._right[i] += self._weight[i] * (i == right)
            if self._weight[i] > 2**40:
                self._scale(i, 1 / self._weight[i])

    def odds(self) -> tuple[float, ...]:
        """How often a guess of each rank is right, given that its parent is; at first as the prior says."""
        if self._odds is None:  # asked for several times a message, while workers wait
            out, wrong = list[float](), 1.0
            for share in self.shares():
                out.append(wrong * share)
                wrong *= 1 - share
            self._odds = tuple(out)
        return self._odds

    def shares(self) -> tuple[float, ...]:
        """As `odds`, of guesses of each rank where those before it were wrong: what a prior says."""
        return tuple(self._share(rank) for rank in range(len(self.prior)))

    def tried(self, rank: int) -> float:
        """Observations of this rank that still count."""
        return self._tried[rank] / self._weight[rank]

    def _share(self, rank: int) -> float:
        right = self._right[rank] / self._weight[rank]
        return (right + PRIOR_WEIGHT * self.prior[rank]) / (self.tried(rank) + PRIOR_WEIGHT)

    def _scale(self, rank: int, factor: float) -> None:
        for counts in (self._tried, self._right, self._weight):
            counts[rank] *= factor
