"""What time costs on simulated hardware: seconds of a step by its rows, and of a message."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Curve:
    """points: (rows, seconds), ascending; the first is of one row. Linear in between, and on as the last two go."""

    points: tuple[tuple[int, float], ...]

    def seconds(self, rows: int) -> float:
        """Of a step of `rows` >= 1."""
        points = self.points
        if len(points) == 1:
            return points[0][1]
        i = min(max(bisect_left(points, (rows,)), 1), len(points) - 1)
        (low, short), (high, long) = points[i - 1], points[i]
        return short + (long - short) * (rows - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Hardware:
    """hop_s: of a message, one way, KV transfers too."""

    target: Curve
    drafter: Curve
    hop_s: float
