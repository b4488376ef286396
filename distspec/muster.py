"""When a worker's next step is to begin: at once, or after the little while in which more requests will be back.

A request that was just answered comes back with its next drafts. Where a step costs much the same for few rows as for
many, a worker that takes whatever is ready lets its requests fall into groups that take turns, each paying for a step
of its own: 64 requests in two groups get little more than half the tokens of 64 in one. So what a step yields per
second decides, the wait included. Where steps get dearer with their rows, nobody waits.

Knows rows, seconds, and how long requests stay away. Does not know what is computed, or why somebody comes back.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator

from distspec.curve import Latency

DELAYS = 64
"""Latest returns that say how long the next ones take."""

GAIN = 1.01
"""A wait must be worth this much, since what is expected is not certain."""

GRACE = 0.05
"""Share of a time away by which a return may be later than those before it. Else a worker that has waited would begin
just before they come, and pay for both."""

NO_TIME_S = 1e-6
"""A wait that is shorter is over: what rounding leaves of one would be waited for without end."""


class Muster:
    """One worker's. All times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._cost = Latency()
        self._away: dict[int, tuple[float, int]] = {}
        self._latest: deque[float] = deque()
        self._delays: list[float] = []

    def stepped(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        self._cost.observe(rows, seconds)

    def answered(self, request: int, rows: int, now_s: float) -> None:
        """Nothing of the request is left to compute; it had so many rows."""
        self._away[request] = now_s, rows

    def returned(self, request: int, now_s: float) -> None:
        """There is work of it again."""
        since = self._away.pop(request, None)
        if since is None:
            return
        self._latest.append(now_s - since[0])
        insort(self._delays, now_s - since[0])
        if len(self._latest) > DELAYS:
            del self._delays[bisect_right(self._delays, self._latest.popleft()) - 1]

    def left(self, request: int) -> None:
        """It will not come back."""
        self._away.pop(request, None)

    def wait_s(self, ready: int, rows: int, now_s: float) -> float:
        """How much longer a step of so many requests and rows should wait for others; 0 if it should begin.

        To be asked again when somebody came, or when the time is over. What counts is requests served per second.
        """
        if not ready or not self._away or not self._delays or not self._cost.is_known:
            return 0.0
        cost = self._cost.curve()
        most, wait_s = GAIN * ready / cost(rows), 0.0
        for after_s, more in sorted(self._expected(now_s)):
            ready, rows = ready + 1, rows + more
            value = ready / (after_s + cost(rows))
            if value > most:
                most, wait_s = value, after_s
        return wait_s if wait_s > NO_TIME_S else 0.0

    def _expected(self, now_s: float) -> Iterator[tuple[float, int]]:
        """(seconds from now, rows) of those that are away. Who was away for so long comes back after the median of
        the returns that took longer; who is away for longer than any was is not expected any more."""
        for since_s, rows in self._away.values():
            gone_s = now_s - since_s
            first = bisect_right(self._delays, gone_s / (1 + GRACE))
            if first < len(self._delays):
                yield self._delays[(first + len(self._delays)) // 2] * (1 + GRACE) - gone_s, rows
