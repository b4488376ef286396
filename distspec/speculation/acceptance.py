"""How often a guess is right, by its depth and rank, learned from what the walk kept.

Knows depths, ranks and counts. Does not know tokens, trees or who drafted; one class of requests (say greedy ones
of one drafter) has one `Acceptance`, whoever keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

PRIOR = (0.6, 0.12, 0.05, 0.03, 0.02)
"""How often a guess of each rank is taken to be right until it is known."""

PRIOR_WEIGHT = 10.0
"""Observations that the prior counts as; and those that all depths together count as, for one of them."""

HALF_LIFE = 500
"""Observations after which an observation counts half."""

DEPTHS = 8
"""Depths told apart; the last one stands for all below it."""


class Acceptance:
    """Decaying counts, so that drift is followed.

    An observation is one node whose outcome is known, on the committed path. depth: its children's level below the
    end of the text that their drafter knew, from 0. rank: of the child that was right, or None. children: how many
    there were; ranks beyond were not tried and say nothing.
    """

    def __init__(self, prior: Sequence[float] = PRIOR) -> None:
        self.prior = tuple(prior)
        ranks = len(self.prior)
        self._tried = [[0.0] * ranks for _ in range(DEPTHS)]
        self._right = [[0.0] * ranks for _ in range(DEPTHS)]
        self._weight = 1.0

    def observe(self, depth: int, rank: int | None, children: int) -> None:
        """Weights grow instead of all counts shrinking; they are scaled back before they overflow."""
        self._weight *= 2 ** (1 / HALF_LIFE)
        level = min(depth, DEPTHS - 1)
        tried, right = self._tried[level], self._right[level]
        for i in range(min(children, len(self.prior))):
            tried[i] += self._weight
        if rank is not None and rank < min(children, len(self.prior)):
            right[rank] += self._weight
        if self._weight > 2**40:
            self._scale(1 / self._weight)

    def odds(self, depth: int | None = None) -> tuple[float, ...]:
        """How often a guess of each rank is right, given that its parent is; of all depths together by default.

        A depth that was seldom seen is taken to be like all together, and these, at first, like the prior.
        """
        shares = [self._share(rank) for rank in range(len(self.prior))]
        if depth is not None:
            level = min(depth, DEPTHS - 1)
            for rank, share in enumerate(shares):
                tried, right = self._tried[level][rank] / self._weight, self._right[level][rank] / self._weight
                shares[rank] = (right + PRIOR_WEIGHT * share) / (tried + PRIOR_WEIGHT)
        left = 1.0  # ranks are counted apart, and of later ones less is known; together they are right at most always
        for rank, share in enumerate(shares):
            shares[rank] = min(share, left)
            left -= shares[rank]
        return tuple(shares)

    def table(self) -> tuple[tuple[float, ...], ...]:
        """odds by depth, the last for all below it: what `cost` takes."""
        return tuple(self.odds(depth) for depth in range(DEPTHS))

    def tried(self, rank: int = 0) -> float:
        """Observations of this rank that still count."""
        return sum(level[rank] for level in self._tried) / self._weight

    def interval(self, rank: int = 0) -> tuple[float, float]:
        """Where the odds of this rank lie with 95% confidence (Wilson score interval); (0, 1) without observations."""
        tried = self.tried(rank)
        if not tried:
            return 0.0, 1.0
        z = 1.96
        share = self._kept(rank) / tried
        middle = (share + z * z / (2 * tried)) / (1 + z * z / tried)
        reach = z / (1 + z * z / tried) * math.sqrt(share * (1 - share) / tried + (z / (2 * tried)) ** 2)
        return max(0.0, middle - reach), min(1.0, middle + reach)

    def _share(self, rank: int) -> float:
        return (self._kept(rank) + PRIOR_WEIGHT * self.prior[rank]) / (self.tried(rank) + PRIOR_WEIGHT)

    def _kept(self, rank: int) -> float:
        return sum(level[rank] for level in self._right) / self._weight

    def _scale(self, factor: float) -> None:
        for counts in (*self._tried, *self._right):
            counts[:] = [count * factor for count in counts]
        self._weight *= factor
