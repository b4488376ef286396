"""What workers report about speed and what the walk shows about guesses; and the policy that follows for `auto`.

Knows curves, odds and loads. Changes no request; what it advises, the lifecycle carries out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distspec.protocol.messages import Hello
from distspec.speculation.acceptance import Acceptance
from distspec.speculation.cost import best, rate
from distspec.speculation.curve import Curve, Latency, Transport
from distspec.speculation.load import Load
from distspec.speculation.sizes import Sizes

Kind = tuple[bool, ...]
"""A class of requests that share their odds: (greedy,)."""

PATIENCE = 100
"""Observations after which advice is looked at anew."""

GAIN = 1.05
"""What another policy must promise before a request changes to it."""

NO_TIME_S = 1e-6

PROBE_TOKENS = 256
"""Tokens of plain decoding after which a request drafts again for a while, in case that guesses have become right."""

PROBED_TOKENS = 16
"""For how many."""


@dataclass(frozen=True, slots=True)
class Advice:
    policy: str
    sizes: Sizes


class Planner:
    """most: bounds of all sizes. policies: among which `auto` chooses, `ar` aside."""

    def __init__(self, policies: Sequence[str], most: Sizes) -> None:
        self._policies, self._most = tuple(policies), most
        self._target, self._drafter, self._hop = Latency(), Latency(), Transport()
        self._odds: dict[Kind, Acceptance] = {}
        self._seen = 0
        self._advice: dict[tuple[Kind, int, int, int, tuple[str, ...]], tuple[int, Advice]] = {}

    # -- what is seen ----------------------------------------------------------------------------

    def joined(self, hello: Hello) -> None:
        """A worker says what wider steps cost it; that is the shape of the curve until steps are seen."""
        if hello.role != "draft" and len(hello.step_cost) > 1 and not self._target.is_known:
            self._target = Latency(Curve.doubling(hello.step_cost))

    def stepped(self, is_drafter: bool, step: tuple[int, float]) -> None:
        """A worker took a step of so many rows and seconds."""
        (self._drafter if is_drafter else self._target).observe(*step)
        self._seen += step[0] > 0

    def turned(self, turnaround_s: float, span: tuple[float, float]) -> None:
        """A future was answered so long after it was sent; its worker was busy with it for the span."""
        self._hop.observe(turnaround_s, span[1] - span[0])

    def judged(self, kind: Kind, rank: int | None, children: int) -> None:
        """The walk passed a node with so many children, of which that of `rank` was right, or none."""
        self._of(kind).observe(0, rank, children)
        self._seen += 1

    def odds(self, kind: Kind) -> tuple[float, ...]:
        """How often a guess of each rank is right."""
        return self._of(kind).odds()

    # -- what follows ----------------------------------------------------------------------------

    def advise(
        self, kind: Kind, running: int, verifiers: int, drafters: int, policies: Sequence[str], now: Advice | None
    ) -> Advice:
        """The best policy and sizes for a request, of `policies`; `now` unless another is clearly better.

        drafters 0: drafting is part of a target's round, and so of its time.
        """
        if not self._target.is_known or (drafters and not self._drafter.is_known):
            return self._first(policies)
        running = max(1, running)
        key = kind, 1 << (running - 1).bit_length(), verifiers, drafters, tuple(policies)
        found = self._advice.get(key)
        if found is None or self._seen - found[0] >= PATIENCE:
            drafter = self._drafter.curve() if drafters else Curve([(1, NO_TIME_S)])
            load = Load(self._target.curve(), drafter, self._hop.seconds, running, verifiers, max(1, drafters))
            found = self._seen, self._choose(kind, load, policies, now)
            self._advice[key] = found
        return found[1]

    def probe(self, policies: Sequence[str]) -> Advice:
        """A way to see whether guesses are right that costs little where they are not."""
        sizes = replace(self._most, steps=2, nodes=2, topk=1)
        return Advice("sd" if "sd" in policies else "ar", sizes)

    def _first(self, policies: Sequence[str]) -> Advice:
        """Nothing was timed yet: draft a little, and see."""
        sizes = replace(self._most, steps=min(4, self._most.steps), nodes=min(4, self._most.nodes), topk=1)
        return Advice("sd" if "sd" in policies else "ar", sizes)

    def _choose(self, kind: Kind, load: Load, policies: Sequence[str], now: Advice | None) -> Advice:
        odds = (tuple(round(share, 2) for share in self.odds(kind)),)
        usable = [policy for policy in policies if policy in self._policies]
        policy, sizes, top = best(usable, self._most, load, odds)
        if now is not None and now.policy in (*usable, "ar") and rate(now.policy, now.sizes, load, odds) * GAIN >= top:
            return now
        return Advice(policy, sizes)

    def _of(self, kind: Kind) -> Acceptance:
        return self._odds.setdefault(kind, Acceptance())
