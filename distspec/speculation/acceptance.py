"""How often a guess is right, by its depth and rank, learned from what the walk kept.

Knows depths, ranks and counts. Does not know tokens, trees or who drafted; one class of requests (say greedy ones
of one drafter) has one `Acceptance`, whoever keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence

PRIOR = (0.6, 0.3, 0.18, 0.13, 0.1)
"""How often a guess of each rank is taken to be right, where those before it were wrong, until it is known."""

PRIOR_WEIGHT = 10.0
"""Observations that the prior counts as; and those that all depths together count as, for one of them."""

HALF_LIFE = 2000
"""Observations of a rank after which one of them counts half."""

DEPTHS = 8
"""Depths told apart; the last one stands for all below it."""


class Acceptance:
    """Decaying counts, so that drift is followed.

    An observation is one node whose outcome is known, on the committed path. depth: its children's level below the
    end of the text that their drafter knew, from 0. rank: of the child that was right, or None. children: how many
    there were; ranks beyond were not tried and say nothing.

    A rank is tried where those before it were wrong. So the odds of all ranks never sum to more than 1; what is known
    of later ones stays true when the first gets better or worse, and is kept while nobody tries them.
    """

    def __init__(self, prior: Sequence[float] = PRIOR, half_life: float = HALF_LIFE) -> None:
        self.prior = tuple(prior)
        ranks = len(self.prior)
        self._growth = 2 ** (1 / half_life)
        self._tried = [[0.0] * ranks for _ in range(DEPTHS)]
        self._right = [[0.0] * ranks for _ in range(DEPTHS)]
        self._weight = [1.0] * ranks
        self._together: tuple[float, ...] | None = None

    def observe(self, depth: int, rank: int | None, children: int) -> None:
        """Weights grow instead of all counts shrinking; they are scaled back before they overflow."""
        self._together = None
        level = min(depth, DEPTHS - 1)
        known = min(children, len(self.prior))
        right = known if rank is None else rank
        for i in range(min(right + 1, known)):
            self._weight[i] *= self._growth
            self._tried[level][i] += self._weight[i]
            self._right[level][i] += self._weight[i] * (i == right)
            if self._weight[i] > 2**40:
                self._scale(i, 1 / self._weight[i])

    def odds(self, depth: int | None = None) -> tuple[float, ...]:
        """How often a guess of each rank is right, given that its parent is; of all depths together by default.

        A depth that was seldom seen is taken to be like all together, and these, at first, like the prior.
        """
        if depth is not None:
            return self._odds(depth)
        if self._together is None:  # asked for several times a message, while workers wait
            self._together = self._odds(None)
        return self._together

    def _odds(self, depth: int | None) -> tuple[float, ...]:
        out, wrong = list[float](), 1.0
        for share in self.shares(depth):
            out.append(wrong * share)
            wrong *= 1 - share
        return tuple(out)

    def shares(self, depth: int | None = None) -> tuple[float, ...]:
        """As `odds`, of guesses of each rank where those before it were wrong: what a prior says."""
        shares = [self._share(rank) for rank in range(len(self.prior))]
        if depth is not None:
            level = min(depth, DEPTHS - 1)
            for rank, share in enumerate(shares):
                tried, right = (counts[level][rank] / self._weight[rank] for counts in (self._tried, self._right))
                shares[rank] = (right + PRIOR_WEIGHT * share) / (tried + PRIOR_WEIGHT)
        return tuple(shares)

    def table(self) -> tuple[tuple[float, ...], ...]:
        """odds by depth, the last for all below it: what `cost` takes."""
        return tuple(self.odds(depth) for depth in range(DEPTHS))

    def tried(self, rank: int = 0) -> float:
        """Observations of this rank that still count."""
        return sum(level[rank] for level in self._tried) / self._weight[rank]

    def _share(self, rank: int) -> float:
        return (self._kept(rank) + PRIOR_WEIGHT * self.prior[rank]) / (self.tried(rank) + PRIOR_WEIGHT)

    def _kept(self, rank: int) -> float:
        return sum(level[rank] for level in self._right) / self._weight[rank]

    def _scale(self, rank: int, factor: float) -> None:
        for counts in (*self._tried, *self._right):
            counts[rank] *= factor
        self._weight[rank] *= factor
