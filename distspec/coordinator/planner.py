"""What workers report about speed and what the walk shows about guesses; and the policy that follows for `auto`.

Knows curves, odds, loads, and how many tokens the fleet has sent. Changes no request; what it advises, the lifecycle
carries out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from distspec.coordinator.advisor import Advisor, Facts, Guesses, Seen
from distspec.coordinator.promises import Advice
from distspec.curve import Curve, Latency, Transport
from distspec.protocol.messages import Hello
from distspec.speculation.acceptance import Acceptance
from distspec.speculation.grid import candidates
from distspec.speculation.load import Load
from distspec.speculation.sizes import Sizes

Kind = tuple[bool, ...]
"""A class of requests that share their odds: (greedy,)."""

Place = tuple[Kind, int, int, int, tuple[str, ...]]
"""What advice is for: a kind of request, how many run (to a power of two), targets, drafters, policies."""

PLAIN = 16
"""Steps of plain decoding that come before everything else."""

PATIENCE = 300
"""Observations after which it is looked whether curves or odds have moved."""

LEAST = 100
"""Observations before which nothing is valued."""

GUESSES = 40
"""Judged guesses that are waited for as well, but not beyond PATIENCE observations: there may be none."""

CROWD = 4
"""Running requests per verifier up to which `bvsp` is valued at all."""

NO_TIME_S = 1e-6

PROBE_TOKENS = 256
"""Tokens of plain decoding after which a request drafts again for a while, in case that guesses have become right."""

PROBED_TOKENS = 16
"""For how many."""


class Planner:
    """most: bounds of all sizes."""

    def __init__(self, most: Sizes) -> None:
        self._most = most
        self._target, self._drafter, self._hop = Latency(), Latency(), Transport()
        self._odds: dict[Kind, Acceptance] = {}
        self._judged = defaultdict[Kind, Counter[Guesses]](Counter)
        self._until: dict[str, float] = {}
        self._seen = self._steps = self._guesses = self._probes = 0
        self._advisors: dict[Place, Advisor] = {}
        self._asked: Advisor | None = None

    # -- what is seen ----------------------------------------------------------------------------

    def joined(self, hello: Hello) -> None:
        """A worker says what wider steps cost it; that is the shape of the curve until steps are seen."""
        if hello.role != "draft" and len(hello.step_cost) > 1 and not self._target.is_known:
            self._target = Latency(Curve.doubling(hello.step_cost))

    def stepped(self, worker: str, is_drafter: bool, step: tuple[int, float], until_s: float) -> None:
        """A worker took a step of so many rows and seconds, which ended then; each of its requests says so."""
        if step[0] and self._until.get(worker) != until_s:
            self._until[worker] = until_s
            (self._drafter if is_drafter else self._target).observe(*step)
            self._steps += not is_drafter
            self._seen += 1

    def turned(self, turnaround_s: float, span: tuple[float, float]) -> None:
        """A future was answered so long after it was sent; its worker was busy with it for the span."""
        self._hop.observe(turnaround_s, span[1] - span[0])

    def judged(self, kind: Kind, rank: int | None, children: int) -> None:
        """The walk passed a node with so many children, of which that of `rank` was right, or none."""
        self._of(kind).observe(rank, children)
        self._judged[kind][rank, children] += 1
        self._seen += 1
        self._guesses += 1

    def odds(self, kind: Kind) -> tuple[float, ...]:
        """How often a guess of each rank is right."""
        return self._of(kind).odds()

    # -- what follows ----------------------------------------------------------------------------

    def advise(
        self,
        kind: Kind,
        running: int,
        verifiers: int,
        drafters: int,
        policies: Sequence[str],
        now_s: float,
        tokens: int,
    ) -> Advice:
        """The best policy and sizes for a request, of `policies`.

        drafters 0: drafting is part of a target's round, and so of its time. tokens: of the whole fleet, until now_s.
        """
        is_young = self._seen < LEAST or (self._guesses < GUESSES and self._seen < PATIENCE)
        if is_young or not self._target.is_known or (drafters and not self._drafter.is_known):
            return self._first(policies)
        running = max(1, running)
        place = kind, 1 << (running - 1).bit_length(), verifiers, drafters, tuple(policies)
        advisor = self._advisors.get(place)
        if advisor is None or (advisor.is_done and self._seen - advisor.seen >= PATIENCE):
            facts = self._facts(self._of(kind), running, verifiers, drafters)
            if advisor is None:
                some, plain = self._candidates(policies, facts.load), Advice("ar", self._most)
                advisor = self._advisors[place] = Advisor(facts, some, plain, self._seen, not drafters)
            elif facts.have_moved(advisor.facts):
                advisor.begin(facts, self._seen)
            advisor.seen = self._seen
        self._asked = advisor
        seen = Seen(now_s, tokens, self._steps, self._judged[kind], self._probes)
        result = advisor.measure(seen, min(verifiers, running))
        if result is not None:
            luck = Acceptance(self._of(kind).shares(), math.inf)
            for rank, children in result.judged.elements():
                luck.observe(rank, children)
            now, lucky = (self._facts(odds, running, verifiers, drafters) for odds in (self._of(kind), luck))
            advisor.learn(result, now, lucky.odds)
        return advisor.advice or self._first(policies)

    @property
    def is_valuing(self) -> bool:
        """What was asked for last is not known yet."""
        return self._asked is not None and not self._asked.is_done

    def think(self, pieces: int) -> None:
        """Go on with valuing. Requests that are leased ask for advice only now and then, so this goes by itself."""
        if self._asked is not None and not self._asked.is_done:
            self._asked.go_on(pieces)

    def probes(self) -> None:
        """A request does as `probe` says, and not as it was advised."""
        self._probes += 1

    def probe(self, policies: Sequence[str]) -> Advice:
        """A way to see whether guesses are right that costs little where they are not."""
        sizes = replace(self._most, steps=min(2, self._most.steps), nodes=min(2, self._most.nodes), topk=1)
        return Advice("sd" if "sd" in policies else "ar", sizes)

    def _first(self, policies: Sequence[str]) -> Advice:
        """Little was timed yet: decode plainly for a while, so that narrow steps are known, then draft a little; with
        branches where that may be, so that second guesses are known too."""
        if self._steps < PLAIN:
            return Advice("ar", self._most)
        few, nodes = (min(4, most) for most in (self._most.steps, self._most.nodes))
        sizes = replace(self._most, steps=few, nodes=min(few, nodes), topk=1, lookahead=1)
        return Advice(next((policy for policy in ("ssd", "sd") if policy in policies), "ar"), sizes)

    def _candidates(self, policies: Sequence[str], load: Load) -> Iterator[tuple[str, Sizes]]:
        """`bvsp` is for verifiers that would wait otherwise; where many share them it loses."""
        is_crowded = load.batch > CROWD * load.verifiers
        return candidates([policy for policy in policies if policy != "bvsp" or not is_crowded], self._most)

    def _facts(self, guesses: Acceptance, running: int, verifiers: int, drafters: int) -> Facts:
        drafter = self._drafter.curve() if drafters else Curve([(1, NO_TIME_S)])
        load = Load(self._target.curve(), drafter, self._hop.seconds, running, verifiers, max(1, drafters))
        return Facts(load, (tuple(round(share, 3) for share in guesses.odds()),))

    def _of(self, kind: Kind) -> Acceptance:
        if kind not in self._odds:
            self._odds[kind] = Acceptance()
        return self._odds[kind]
