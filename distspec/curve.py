"""What a step costs: seconds against rows, as shipped, as a worker reported, and as observed since.

Knows rows and seconds. Rows are rows: a verifier that lacks s committed tokens and judges n nodes computes s + n.
Does not know what a row is for, which worker it was, or the time of day.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence

from distspec.errors import InvalidValue

WINDOW = 15
"""Observations of which a quantile is taken: eight of a new speed outvote the old, and seven outliers do not count."""

STALE = 100
"""Steps after which a bucket that saw none of them becomes part of the shape, before the machine has changed much."""

GENERATION = 5000
"""Observations of a transport that are forgotten together."""

WIDEST = 2**14
"""Rows of the widest bucket."""


class Curve:
    """Seconds of a step of so many rows: piecewise linear through measured points, and never falling.

    points: (rows, seconds), in any order. Where a wider step was measured cheaper than a narrower one, that is noise,
    and both get their mean (pool adjacent violators). Below the narrowest point as there; beyond the widest on along
    the last slope, so never cheaper than there. Raises InvalidValue for no point, or for one that is not positive.
    """

    __slots__ = ("rows", "seconds")

    def __init__(self, points: Iterable[Sequence[float]]) -> None:
        known = sorted((float(rows), float(seconds)) for rows, seconds in points)
        if not known or not all(rows > 0 and 0 < seconds < math.inf for rows, seconds in known):
            raise InvalidValue("curve", known[:4], "pairs of positive rows and seconds, at least one")
        self.rows = tuple(rows for rows, _ in known)
        self.seconds = _rising([seconds for _, seconds in known])

    @classmethod
    def doubling(cls, costs: Sequence[float]) -> Curve:
        """costs[i]: of 2**i rows, in any unit (`Hello.step_cost`); empty: every step costs the same."""
        return cls([(2**i, cost) for i, cost in enumerate(costs or (1.0,))])

    def __call__(self, rows: float) -> float:
        """Seconds of a step; rows may be an average of steps."""
        at, cost = self.rows, self.seconds
        if rows <= at[0] or len(at) == 1:
            return cost[0]
        i = min(bisect_right(at, rows), len(at) - 1)
        width = at[i] - at[i - 1]
        return cost[i] if not width else cost[i - 1] + (cost[i] - cost[i - 1]) * (rows - at[i - 1]) / width


class Latency:
    """A curve that follows what is observed.

    shape: what is known beforehand, in any unit. Each power-of-two bucket of rows keeps its latest steps; the median of
    their ratios to the shape scales the shape there. Between buckets the ratio is interpolated, outside it is the
    nearest one's, so a bucket that is not seen follows the others when the machine's speed changes: what it once knew
    becomes the shape.
    """

    def __init__(self, shape: Curve | None = None) -> None:
        self._shape = shape or Curve.doubling(())
        self._buckets: dict[int, deque[tuple[int, float]]] = {}
        self._seen: dict[int, int] = {}
        self._count = 0
        self._curve: Curve | None = None

    @property
    def is_known(self) -> bool:
        """Whether `curve` is in seconds, not in the unit of the shape."""
        return bool(self._buckets)

    def observe(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long. Nonsense (no rows, no time) is ignored: a worker said it."""
        if not (0 < rows <= WIDEST and 0 < seconds < math.inf):
            return
        bucket = (rows - 1).bit_length()
        self._buckets.setdefault(bucket, deque(maxlen=WINDOW)).append((rows, seconds))
        self._count += 1
        self._seen[bucket] = self._count
        self._curve = None

    def curve(self) -> Curve:
        """As known now."""
        if self._curve is None:
            self._curve = self._fit()
        return self._curve

    def _fit(self) -> Curve:
        if stale := [bucket for bucket, seen in self._seen.items() if self._count - seen > STALE]:
            self._shape = self._scaled()
            for bucket in stale:
                del self._buckets[bucket], self._seen[bucket]
        return self._scaled()

    def _scaled(self) -> Curve:
        ratios = sorted(
            (
                quantile((rows for rows, _ in window), 0.5),
                quantile((seconds / self._shape(rows) for rows, seconds in window), 0.5),
            )
            for window in self._buckets.values()
        )
        widest = max([self._shape.rows[-1], *(rows for rows, _ in ratios)])
        grid = {2.0**i for i in range(int(math.log2(widest)) + 1)} | {at for at, _ in ratios}
        return Curve([(rows, self._shape(rows) * _ratio(ratios, rows)) for rows in grid])


class Transport:
    """Seconds that a message and its answer spend on the way, from turnarounds and the worker's own span.

    A turnaround also holds the wait for the step that ran when the message came, and of busy workers every one does.
    So the least counts that was seen lately, in this generation of observations or the one before.
    """

    def __init__(self) -> None:
        self._least = [math.inf, math.inf]
        self._count = 0

    def observe(self, turnaround_s: float, span_s: float) -> None:
        self._count += 1
        if self._count % GENERATION == 0:
            self._least = [math.inf, self._least[0]]
        self._least[0] = min(self._least[0], max(0.0, turnaround_s - span_s))

    @property
    def seconds(self) -> float:
        """0 until something was observed."""
        least = min(self._least)
        return least if math.isfinite(least) else 0.0


def quantile(values: Iterable[float], share: float) -> float:
    """The value below which this share of a non-empty collection lies; of two in question, their mean."""
    ranked = sorted(values)
    at = share * (len(ranked) - 1)
    return (ranked[math.floor(at)] + ranked[math.ceil(at)]) / 2


def _ratio(ratios: Sequence[tuple[float, float]], rows: float) -> float:
    """Linear between the rows of `ratios`."""
    if not ratios:
        return 1.0
    i = bisect_right(ratios, (rows, math.inf))
    if i == 0 or i == len(ratios):
        return ratios[min(i, len(ratios) - 1)][1]
    (low, a), (high, b) = ratios[i - 1], ratios[i]
    return a + (b - a) * (rows - low) / (high - low)


def _rising(values: Sequence[float]) -> tuple[float, ...]:
    """The nearest sequence that never falls (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, n = blocks.pop()
            mean, count = (before * n + mean * count) / (n + count), n + count
        blocks.append((mean, count))
    return tuple(mean for mean, count in blocks for _ in range(count))
