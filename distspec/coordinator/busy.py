"""How long a worker was busy, told by spans of its work that overlap: those of one step do.

Knows intervals. Does not know whose they are, or what was done in them.
"""

from __future__ import annotations

from collections import deque

_REMEMBERED = 1024
"""Stretches that a late span may still reach back into."""


class Busy:
    """The union of spans that are told in the order in which they end."""

    def __init__(self) -> None:
        self._stretches: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    def add(self, start_s: float, end_s: float) -> float:
        """Seconds that this span adds to those before, 0 to end_s - start_s."""
        new_s, before = end_s - start_s, self._stretches
        while before and before[-1][1] >= start_s:
            start, end = before.pop()
            new_s -= max(0.0, min(end, end_s) - max(start, start_s))
            start_s, end_s = min(start, start_s), max(end, end_s)
        before.append((start_s, end_s))
        return max(0.0, new_s)
