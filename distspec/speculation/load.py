"""What work costs on a fleet as it is loaded now: curves, pools, and the requests that share their steps.

Knows rows and seconds. Does not know policies or odds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from distspec.curve import Curve

LATE = 0.25
"""How often a step among several requests begins without one that is late: it waits for them if that is worth it (see
`muster`). Of `pearl`, whose requests come back one by one; from the timed simulator, where 0.1 to 0.4 fit alike."""


@dataclass(frozen=True, slots=True)
class Load:
    """target, drafter: seconds of a step against its rows. hop_s: seconds that a message and its answer spend on the
    way, to a verifier as to a drafter. batch: requests that run. verifiers, drafters: replicas they share."""

    target: Curve
    drafter: Curve
    hop_s: float = 0.0
    batch: int = 1
    verifiers: int = 1
    drafters: int = 1

    def sharing(self, futures: float = 1.0) -> float:
        """Futures in one step of a verifier, where each request has so many in flight."""
        return max(1.0, self.batch * futures / self.verifiers)

    def verify_s(self, rows: float, futures: float = 1.0) -> float:
        """From sending a future of so many rows to its verdict, on a verifier that begins at once."""
        return self.target(rows * self.sharing(futures)) + self.hop_s

    def draft_s(self, rows: float) -> float:
        """A step of the drafter in which each request has so many rows."""
        return self.drafter(rows * max(1.0, self.batch / self.drafters))

    def late_s(self, wait_s: float, step_s: float) -> float:
        """How much later a verdict is for work that comes `wait_s` after its verifier became free.

        A verifier of its own waits for it; one that others share may have begun a step by then, which ends first.
        """
        others = LATE * min(1.0, self.sharing() - 1.0)
        if wait_s <= 0 or not others:
            return wait_s
        return wait_s + others * (math.ceil(wait_s / step_s) * step_s - wait_s)
