"""What workers report about speed and what the walk shows about guesses; and the policy that follows for `auto`.

Knows curves, odds, loads, and how many tokens came of its advice. Changes no request; what it advises, the lifecycle
carries out.

The cost model says what every policy should yield at its best sizes. What the fleet really yields under an advice
corrects the model for these sizes, and others of the policy until they are tried. How many guesses happened to be right
meanwhile is luck, so it is compared with what the model promises for just so many; what is left is the model's error,
and a few hundred tokens tell it within some percent. A policy that was never tried gets a little credit, so that it
will be.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from distspec.curve import Curve, Latency, Transport
from distspec.protocol.messages import Hello
from distspec.speculation.acceptance import Acceptance
from distspec.speculation.branches import Valuing
from distspec.speculation.cost import candidates, value
from distspec.speculation.expected import Odds
from distspec.speculation.load import Load
from distspec.speculation.sizes import Sizes

Kind = tuple[bool, ...]
"""A class of requests that share their odds: (greedy,)."""

Guesses = tuple[int | None, int]
"""The rank of the guess that was right, or None; and how many guesses there were."""

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

MOVED = 0.06
"""Relative change of a curve, or change of an odd, after which all candidates are valued anew."""

PROBED_ROWS = (1, 8)
"""Rows per request at which two curves are compared: what no step has is guessed, and guesses jump."""

AT_ONCE = 8
"""Pieces of the valuing that are done per message of a worker: a few milliseconds."""

CROWD = 4
"""Running requests per verifier up to which `bvsp` is valued at all."""

CREDIT = 1.1
"""What the promise of a policy that was never tried is multiplied with; or divided by, where it is not CLEARLY more
than that of plain decoding."""

CLEARLY = 1.03

TRIED = 4
"""Sizes of a policy that are tried: the best, and some to go to where it does not hold what it promised."""

MEMORY = 6
"""Measurements of an advice that are averaged; of later ones, each counts for one in so many."""

WINDOW, WINDOW_STEPS = 300, 40
"""Tokens of a measurement, and steps of each target that has something to do: in less, where a step begins and ends
counts."""

SETTLE_STEPS = 20
"""Steps that come before."""

SETTLE_S = 1.5
"""Seconds that come before as well where requests are leased: they are asked back only now and then."""

NO_TIME_S = 1e-6

PROBE_TOKENS = 256
"""Tokens of plain decoding after which a request drafts again for a while, in case that guesses have become right."""

PROBED_TOKENS = 16
"""For how many."""


@dataclass(frozen=True, slots=True)
class Advice:
    policy: str
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Facts:
    """What values are computed from."""

    load: Load
    odds: Odds

    def value(self, advice: Advice) -> Valuing:
        """Expected tokens per second of all requests, piece by piece."""
        return value(advice.policy, advice.sizes, self.load, self.odds)

    def have_moved(self, before: Facts) -> bool:
        widths = [rows * self.load.sharing() for rows in PROBED_ROWS]
        curves = [[f.load.target(rows) for rows in widths] + [f.load.drafter(1)] for f in (self, before)]
        moved = any(abs(a - b) > MOVED * b for a, b in zip(*curves, strict=True))
        moved |= abs(self.load.hop_s - before.load.hop_s) > MOVED * self.load.target(1)
        return moved or any(abs(a - b) > MOVED for a, b in zip(self.odds[0], before.odds[0], strict=True))


class Seen(NamedTuple):
    """A moment: seconds, tokens that the fleet has sent, steps of targets, and what the walk has shown, by then."""

    now_s: float
    tokens: int
    steps: int
    judged: Counter[Guesses]

    def kept(self) -> Seen:
        return self._replace(judged=self.judged.copy())


@dataclass(slots=True)
class _Trial:
    """A measurement of the present advice. It begins after so many steps, and not before so many seconds."""

    advice: Advice
    settles: tuple[int, float]
    began: Seen | None = None


class _Advisor:
    """The advice for one place. What takes long is worked out a little at a time, so that no event waits for it."""

    def __init__(
        self, facts: Facts, some: Iterator[tuple[str, Sizes]], plain: Advice, seen: int, is_local: bool
    ) -> None:
        self._plain, self._is_local = plain, is_local
        self._measured: dict[Advice, tuple[int, float]] = {}
        self._trial: _Trial | None = None
        self.advice: Advice | None = None
        self.begin(facts, some, seen)

    def begin(self, facts: Facts, some: Iterator[tuple[str, Sizes]], seen: int) -> None:
        """Value everything anew. Measurements count half of what they did; one alone is forgotten, so that what was
        left once is tried again when the world has changed."""
        self.facts, self.seen = facts, seen
        self._measured = {advice: (count // 2, ratio) for advice, (count, ratio) in self._measured.items() if count > 1}
        self._values: dict[Advice, float] = {}
        self._work = self._value(some)
        self.is_done = False

    def go_on(self, pieces: int) -> None:
        for _ in range(pieces):
            if next(self._work, self) is self:
                self.is_done, self.advice = True, self._best()
                return

    def _value(self, some: Iterator[tuple[str, Sizes]]) -> Iterator[None]:
        """Policies come one after the other, those that take long last: at first, the best until now is advised before
        the next."""
        is_first, policy = self.advice is None, self._plain.policy
        for advice in chain([self._plain], (Advice(policy, sizes) for policy, sizes in some)):
            if is_first and advice.policy != policy:
                self.advice = self._best()
            self._values[advice] = yield from self.facts.value(advice)
            policy = advice.policy
            yield

    def measure(self, now: Seen, targets: int) -> _Trial | None:
        """A trial that is over now, if one is. targets: how many have something to do."""
        trial = self._trial
        if self.advice is None:
            return None
        if trial is None or trial.advice != self.advice:
            is_leased = self._is_local or self._plain == self.advice or trial is None or trial.advice == self._plain
            self._trial = _Trial(self.advice, (now.steps + SETTLE_STEPS * targets, now.now_s + SETTLE_S * is_leased))
        elif trial.began is None:
            if now.steps >= trial.settles[0] and now.now_s >= trial.settles[1]:
                trial.began = now.kept()
        elif (
            self.is_done
            and now.tokens - trial.began.tokens >= WINDOW
            and now.steps - trial.began.steps >= WINDOW_STEPS * targets
            and now.now_s > trial.began.now_s
        ):
            self._trial = _Trial(self.advice, trial.settles, now.kept())
            return trial
        return None

    def learn(self, tokens_s: float, advice: Advice, facts: Facts) -> None:
        """So much came of an advice while these were the facts."""
        self._work, self.is_done = self._compare(tokens_s, advice, facts), False

    def _compare(self, tokens_s: float, advice: Advice, facts: Facts) -> Iterator[None]:
        """What promises are is known better now too, as steps may have been wider than any before: whatever comes out
        best is valued anew before it is advised; by the same odds as all others, or luck would choose."""
        promised = yield from facts.value(advice)
        count, ratio = self._measured.get(advice, (0, 0.0))
        count = min(count + 1, MEMORY)
        self._measured[advice] = count, ratio + (tokens_s / promised - ratio) / count
        now, known = replace(facts, odds=self.facts.odds), set[Advice]()
        while advice not in known:
            yield
            self._values[advice] = yield from now.value(advice)
            known.add(advice)
            advice = self._best()

    def _factor(self, advice: Advice) -> float:
        """What a promise is multiplied with. Sizes that were not tried share what is known of others of the policy: the
        more, the nearer these are and the oftener they were measured."""
        if advice in self._measured:
            return self._measured[advice][1]
        tried = [
            (count / (1.0 + _apart(one.sizes, advice.sizes)), ratio)
            for one, (count, ratio) in self._measured.items()
            if one.policy == advice.policy
        ]
        if tried:
            logs = sum(weight * math.log(ratio) for weight, ratio in tried)
            return math.exp(logs / (1.0 + sum(weight for weight, _ in tried)))
        if advice == self._plain:
            return 1.0
        return CREDIT if self._values[advice] > CLEARLY * self._values[self._plain] else 1 / CREDIT

    def _best(self) -> Advice:
        """Of a policy of which enough sizes were tried, those count alone."""
        tried = Counter(advice.policy for advice in self._measured)
        some = (one for one in self._values if one in self._measured or tried[one.policy] < TRIED)
        return max(some, key=lambda advice: self._values[advice] * self._factor(advice))


def _apart(one: Sizes, other: Sizes) -> float:
    """How many doublings lie between two sizes, over all that candidates differ in."""
    fields = ("steps", "topk", "nodes", "lookahead", "early")
    return sum(abs(math.log2(max(1, getattr(one, name)) / max(1, getattr(other, name)))) for name in fields)


class Planner:
    """most: bounds of all sizes."""

    def __init__(self, most: Sizes) -> None:
        self._most = most
        self._target, self._drafter, self._hop = Latency(), Latency(), Transport()
        self._odds: dict[Kind, Acceptance] = {}
        self._judged: dict[Kind, Counter[Guesses]] = {}
        self._until: dict[str, float] = {}
        self._seen = self._steps = self._guesses = 0
        self._advisors: dict[Place, _Advisor] = {}
        self._asked: _Advisor | None = None

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
        self._of(kind).observe(0, rank, children)
        self._judged.setdefault(kind, Counter())[rank, children] += 1
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
                advisor = self._advisors[place] = _Advisor(facts, some, plain, self._seen, not drafters)
            elif facts.have_moved(advisor.facts):
                advisor.begin(facts, self._candidates(policies, facts.load), self._seen)
            advisor.seen = self._seen
        self._asked = advisor
        now = Seen(now_s, tokens, self._steps, self._judged.setdefault(kind, Counter()))
        trial = advisor.measure(now, min(verifiers, running))
        if trial is not None and trial.began is not None:
            luck = Acceptance(self._of(kind).shares(), math.inf)
            for rank, children in (now.judged - trial.began.judged).elements():
                luck.observe(0, rank, children)
            tokens_s = (now.tokens - trial.began.tokens) / (now_s - trial.began.now_s)
            advisor.learn(tokens_s, trial.advice, self._facts(luck, running, verifiers, drafters))
        return advisor.advice or self._first(policies)

    def think(self) -> None:
        """Go on with valuing, for a few milliseconds. Requests that are leased ask for advice only now and then, so
        this goes by what workers say."""
        if self._asked is not None and not self._asked.is_done:
            self._asked.go_on(AT_ONCE)

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
        """`bvsp` is for verifiers that would wait otherwise; where many share them it loses, and is valued longest. The
        more others there are, the fewer nodes are enough for each."""
        is_crowded = load.batch > CROWD * load.verifiers
        most = replace(self._most, early=-(-self._most.early // max(1, load.verifiers // 2)))
        return candidates([policy for policy in policies if policy != "bvsp" or not is_crowded], most)

    def _facts(self, guesses: Acceptance, running: int, verifiers: int, drafters: int) -> Facts:
        drafter = self._drafter.curve() if drafters else Curve([(1, NO_TIME_S)])
        load = Load(self._target.curve(), drafter, self._hop.seconds, running, verifiers, max(1, drafters))
        return Facts(load, (tuple(round(share, 2) for share in guesses.odds()),))

    def _of(self, kind: Kind) -> Acceptance:
        return self._odds.setdefault(kind, Acceptance())
