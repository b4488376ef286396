"""Virtual time, and links that delay: first in, first out each, in random order across links.

Knows names, delays and terms. Does not know what is sent.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random


class Network:
    """term: the life of the coordinator; what was sent in an earlier one does not arrive."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.now_s = 0.0
        self.term = 1
        self._order = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._arrivals: dict[tuple[str, str], float] = {}

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._order, action))

    def soon(self, least_s: float, most_s: float, action: Callable[[], None]) -> None:
        """After a random delay."""
        self.later(self.rng.uniform(least_s, most_s), action)

    def deliver(self, source: str, to: str, action: Callable[[], None]) -> None:
        """After a random delay, behind everything sent on this link before."""
        slow = self.rng.random() < 0.1
        arrival = self.now_s + self.rng.uniform(0.001, 2.0 if slow else 0.1)
        arrival = max(arrival, self._arrivals.get((source, to), 0.0) + 1e-6)
        self._arrivals[source, to] = arrival
        term = self.term
        self.later(arrival - self.now_s, lambda: action() if term == self.term else None)

    def turn(self) -> bool:
        """Let time pass to the next thing that happens, and do it. False if nothing is left."""
        if not self._heap:
            return False
        self.now_s, _, action = heapq.heappop(self._heap)
        action()
        return True
