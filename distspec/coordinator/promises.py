"""How far the cost model keeps its promises, from advice that was tried; and what may be hoped of the rest.

Knows advice and how much came of it as a share of what was promised. Does not know what is promised, odds, or time.

What lacks to a promise is taken to be alike for all, more so within a policy, and most for similar sizes: a Gaussian
process. Whoever picks the most hopeful (expected and one deviation) explores no more than is worth it (GP-UCB, Srinivas
et al., arXiv 0912.3995).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distspec.speculation.sizes import Sizes

ALL, POLICY, SIZES = 0.05, 0.1, 0.03
"""Deviations of the log of what is kept: what all share, all sizes of a policy, and what is of the sizes themselves."""

UNKNOWN = ALL**2 + POLICY**2 + SIZES**2
"""Variance of what was never tried."""

REACH = 2.0
"""Doublings after which half as much is known of the latter."""

AGED, MOVED = 0.01, 0.02
"""Deviation that is added to all that was known: with each measurement of another, and when the world has changed."""


@dataclass(frozen=True, slots=True)
class Advice:
    policy: str
    sizes: Sizes


class Hope(NamedTuple):
    """What a promise is to be multiplied with: expected, and one deviation above. That is of how much more is kept than
    of the promise that was kept best until now: what is not known of both alike is nothing to hope for."""

    kept: float
    bold: float


class Promises:
    def __init__(self) -> None:
        self._tried: dict[Advice, tuple[float, float]] = {}
        """Log of what was kept, and its variance."""

    def __contains__(self, advice: Advice) -> bool:
        """Whether it was tried, and that still tells something."""
        return advice in self._tried

    def tried(self) -> Iterable[Advice]:
        return self._tried.keys()

    def learn(self, advice: Advice, kept: float, noise: float) -> None:
        """It yielded so much of what was promised, as far as a measurement of this deviation can tell."""
        self._age(AGED)
        mean, variance = self._tried.get(advice, (0.0, math.inf))
        new = 1.0 / (1.0 / variance + 1.0 / noise**2)
        self._tried[advice] = mean + (math.log(kept) - mean) * new / noise**2, new

    def doubt(self) -> None:
        """The world has changed. What tells nothing any more is forgotten, and what was left once is tried again."""
        self._age(MOVED)

    def hopes(self, some: Iterable[Advice], best: Advice | None = None) -> dict[Advice, Hope]:
        """Of each of these, where `best` is what they are compared with."""
        tried, means = list(self._tried), [mean for mean, _ in self._tried.values()]
        inverse = _inverse([[_shared(one, other) + self._noise(one, other) for other in tried] for one in tried])

        def near(advice: Advice) -> list[float]:
            return [_shared(advice, other) for other in tried]

        def known(one: Sequence[float], other: Sequence[float]) -> float:
            return _dot([_dot(row, one) for row in inverse], other)

        found, its = {}, near(best) if best is not None else []
        for advice in some:
            own = near(advice)
            variance = UNKNOWN - known(own, own)
            if best is not None:
                variance += UNKNOWN - known(its, its) - 2 * (_shared(advice, best) - known(own, its))
            mean = known(own, means)
            found[advice] = Hope(math.exp(mean), math.exp(mean + math.sqrt(max(0.0, variance))))
        return found

    def _noise(self, one: Advice, other: Advice) -> float:
        return self._tried[one][1] if one == other else 0.0

    def _age(self, deviation: float) -> None:
        aged = {advice: (mean, variance + deviation**2) for advice, (mean, variance) in self._tried.items()}
        self._tried = {advice: known for advice, known in aged.items() if known[1] < UNKNOWN}


def _shared(one: Advice, other: Advice) -> float:
    """Covariance of what is kept of two promises."""
    if one.policy != other.policy:
        return ALL**2
    fields = ("steps", "topk", "nodes", "lookahead", "branch_nodes", "branch_topk")
    pairs = ((getattr(one.sizes, name), getattr(other.sizes, name)) for name in fields)
    apart = sum(abs(math.log2(max(1, a) / max(1, b))) for a, b in pairs)
    return ALL**2 + POLICY**2 + SIZES**2 * 2 ** (-apart / REACH)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of a symmetric, positive matrix (Gauss-Jordan)."""
    size = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for i in range(size):
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for j in range(size):
            if j != i:
                rows[j] = [value - rows[j][i] * own for value, own in zip(rows[j], rows[i], strict=True)]
    return [row[size:] for row in rows]
