"""What is advised for one kind of load: all is valued, the best is measured, and what may be better is tried.

Knows values, trials and how much came of them. Does not know workers, requests, or where values come from.

The cost model says what every policy should yield at its best sizes. What the fleet really yields under an advice
corrects the model, for these sizes and similar ones (`Promises`). How many guesses happened to be right meanwhile is
luck, which is taken out; what is left is the model's error, and a few hundred tokens tell it within some percent.

The most hopeful is tried, be it of the sizes that are worth comparing anywhere or next to the best until now. A trial
that shows that it is bad ends early, and what all of them have cost is bounded by a share of the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from distspec.coordinator.promises import Advice, Promises
from distspec.speculation.branches import Valuing
from distspec.speculation.cost import PIECEWISE, rate, value
from distspec.speculation.expected import Odds, best_tree
from distspec.speculation.load import Load
from distspec.speculation.sizes import Sizes

Guesses = tuple[int | None, int]
"""The rank of the guess that was right, or None; and how many guesses there were."""

MOVED = 0.04
"""Relative change of what is advised, or of what a tree commits, after which all candidates are valued anew."""

CLEARLY = 1.03
"""How much more than plain decoding a promise must be, for anything to be hoped beyond it."""

BETTER = 1.03
"""How much more than the best until now may be hoped of what is tried."""

TRIALS, RENEWED, EARNED = 5.0, 1.0, 0.05
"""How many trials may fail, at first; how many more when the world has changed; and how many more for each measurement
of the best."""

FAILED, SWITCH = 0.1, 0.5
"""How much less than the best it is that counts as failed. Less counts for a part, and for no less than what it costs
that all requests go over to something else and back."""

WINDOW, WINDOW_STEPS = 300, 24
"""Tokens of a measurement, and steps of all targets: in less, where a step begins and ends counts."""

SETTLE_STEPS = 6
"""Steps of each target that come before."""

SETTLE_S = 1.5
"""Seconds that come before as well where requests are leased: they are asked back only now and then."""

NOISE, EDGES = 0.06, 0.02
"""Deviation of what is measured in so many tokens, luck with guesses aside; and what is left of it in many more."""

LUCK = 0.1
"""The same, luck with guesses included."""

FEW_STEPS = 8
"""Steps of a measurement before which it is not ended."""

BUSH = 12
"""Nodes of a tree that commits about as much more for better guesses as policies that branch."""

MOST_NODES = 64
"""Of a submission that is tried beside the best."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What values are computed from."""

    load: Load
    odds: Odds

    def value(self, advice: Advice) -> Valuing:
        """Expected tokens per second of all requests, piece by piece."""
        return value(advice.policy, advice.sizes, self.load, self.odds)

    def have_moved(self, before: Facts) -> bool:
        """Whether a tree commits more or less, or plain steps, drafts or messages take longer or shorter. What wider
        steps cost matters where they are taken, and is looked at there."""
        pairs = (
            (_bush(self.odds), _bush(before.odds)),
            (self.load.verify_s(1), before.load.verify_s(1)),
            (self.load.draft_s(1), before.load.draft_s(1)),
        )
        return any(_differ(*pair) for pair in pairs)


class Seen(NamedTuple):
    """A moment: seconds, tokens that the fleet has sent, steps of targets, what the walk has shown, and how often a
    request did something else than is advised, to see whether guesses are right, by then."""

    now_s: float
    tokens: int
    steps: int
    judged: Counter[Guesses]
    probes: int = 0

    def kept(self) -> Seen:
        return self._replace(judged=self.judged.copy())


@dataclass(slots=True)
class Trial:
    """A measurement of the present advice. It begins after so many steps, and not before so many seconds; and anew when
    there are more probes, of which one step of many rows can take what ten of its own do."""

    advice: Advice
    settles: tuple[int, float]
    probes: int
    began: Seen | None = None


class Result(NamedTuple):
    """So many tokens per second came of an advice, in so many tokens of all requests; and what was judged meanwhile."""

    advice: Advice
    tokens_s: float
    tokens: int
    judged: Counter[Guesses]


class Advisor:
    """What takes long is worked out a little at a time, so that no event waits for it."""

    def __init__(
        self, facts: Facts, some: Iterable[tuple[str, Sizes]], plain: Advice, seen: int, is_local: bool
    ) -> None:
        self._some = [Advice(*one) for one in some]
        self._plain, self._is_local = plain, is_local
        self._promises = Promises()
        self._trial: Trial | None = None
        self._best, self._rates, self._values = plain, dict[Advice, float](), dict[Advice, float]()
        self._trials = TRIALS
        self.advice: Advice | None = None
        self.begin(facts, seen)

    def begin(self, facts: Facts, seen: int) -> None:
        """Value everything anew, after the world has changed."""
        self.seen = seen
        self._work, self.is_done = self._value(facts), False

    def go_on(self, pieces: int) -> None:
        for _ in range(pieces):
            if next(self._work, self) is self:
                self.is_done, self.advice = True, self._choose()
                return

    def measure(self, now: Seen, targets: int) -> Result | None:
        """What came of a trial that is over now, if one is. targets: how many have something to do."""
        trial = self._trial
        if self.advice is None:
            return None
        if trial is None or trial.advice != self.advice or trial.probes != now.probes:
            is_leased = self._is_local or self._plain == self.advice or trial is None or trial.advice == self._plain
            settles = now.steps + SETTLE_STEPS * targets, now.now_s + SETTLE_S * is_leased
            self._trial = Trial(self.advice, settles, now.probes)
        elif trial.began is None:
            if now.steps >= trial.settles[0] and now.now_s >= trial.settles[1]:
                trial.began = now.kept()
        elif self.is_done and self._is_over(trial.began, now):
            took_s, tokens = now.now_s - trial.began.now_s, now.tokens - trial.began.tokens
            self._trial = Trial(self.advice, trial.settles, now.probes, now.kept())
            return Result(trial.advice, tokens / took_s, tokens, now.judged - trial.began.judged)
        return None

    def learn(self, result: Result, now: Facts, lucky: Odds) -> None:
        """So much came of an advice, by facts as known now, while guesses were right so often. What was better before
        is advised meanwhile."""
        advice, tokens_s = result.advice, result.tokens_s
        if tokens_s < self._rates.get(self._best, 0.0):
            self.advice = self._best
        self._rates[advice] = (tokens_s + self._rates.get(advice, tokens_s)) / 2
        luck = _luck(advice, now.load, lucky, self.facts.odds)
        noise = min(LUCK, math.hypot(NOISE * math.sqrt(WINDOW / result.tokens), EDGES))
        self._work, self.is_done = self._compare(advice, tokens_s / luck, noise, now), False

    def _is_over(self, began: Seen, now: Seen) -> bool:
        """All that was wanted is seen; or so little that, even with bad luck, it is worse than the best."""
        tokens, steps, took_s = now.tokens - began.tokens, now.steps - began.steps, now.now_s - began.now_s
        if took_s <= 0 or tokens <= 0:
            return False
        if tokens >= WINDOW and steps >= WINDOW_STEPS:
            return True
        best = self._rates.get(self._best, 0.0) * took_s
        return steps >= FEW_STEPS and tokens < best - 3 * LUCK * math.sqrt(WINDOW * best)

    def _value(self, facts: Facts) -> Iterator[None]:
        """Policies come one after the other, those that take long last: at first, the best until now is advised before
        the next."""
        self.facts, self._values = facts, {}
        self._promises.doubt()
        self._trials = min(TRIALS, self._trials + RENEWED)
        is_first, policy = self.advice is None, self._plain.policy
        for advice in chain([self._plain], self._some, list(self._promises.tried())):
            if is_first and advice.policy != policy:
                self.advice = self._choose()
            if advice not in self._values:
                self._values[advice] = yield from facts.value(advice)
            policy = advice.policy
            yield

    def _compare(self, advice: Advice, tokens_s: float, noise: float, now: Facts) -> Iterator[None]:
        """What steps cost is known better now too, as they may have been wider than any before. If that matters all is
        valued anew, by the same facts, or luck would choose."""
        yield
        worth = yield from replace(now, odds=self.facts.odds).value(advice)
        self._promises.learn(advice, tokens_s / worth, noise)
        self._trials += self._cost(advice)
        if _differ(worth / now.load.batch, self._values[advice] / self.facts.load.batch):
            yield from self._value(now)
        self._choose()
        for near in _beside(self._best, self._plain.sizes):
            if near not in self._values:
                yield
                self._values[near] = yield from self.facts.value(near)

    def _cost(self, advice: Advice) -> float:
        """What a trial takes of those that are left; or what it adds."""
        if advice == self._best or self._best not in self._promises:
            return EARNED
        kept = self._promises.hopes([advice, self._best])
        worth, best = (self._values[one] * kept[one].kept for one in (advice, self._best))
        return -SWITCH - (1.0 - SWITCH) * min(1.0, max(0.0, 1.0 - worth / best) / FAILED)

    def _choose(self) -> Advice:
        """What may be better than the best that was tried, while that may fail; else that."""
        values, tried = self._values, [advice for advice in self._values if advice in self._promises]
        if tried:
            kept = self._promises.hopes(tried)
            self._best = max(tried, key=lambda advice: values[advice] * kept[advice].kept)
        hopes = self._promises.hopes(values, self._best if tried else None)
        hoped = {advice: value * self._hope(advice, hopes[advice].bold) for advice, value in values.items()}
        bold = max(hoped, key=lambda advice: hoped[advice])
        if not tried:
            return bold
        enough = BETTER * values[self._best] * hopes[self._best].kept
        return bold if self._trials >= 1.0 and hoped[bold] > enough else self._best

    def _hope(self, advice: Advice, bold: float) -> float:
        if advice in self._promises or self._values[advice] > CLEARLY * self._values[self._plain]:
            return bold
        return 1.0 if advice == self._plain else 1 / bold


def _luck(advice: Advice, load: Load, lucky: Odds, usual: Odds) -> float:
    """How much more came of an advice by these odds. Where it branches, by tokens that a bush commits: there the
    model's values jump by some percent where odds move a little."""
    if advice.policy in PIECEWISE:
        return _bush(lucky, advice.sizes.branch_topk) / _bush(usual, advice.sizes.branch_topk)
    return rate(advice.policy, advice.sizes, load, lucky) / rate(advice.policy, advice.sizes, load, usual)


def _bush(odds: Odds, topk: int = BUSH) -> float:
    """Tokens that a verdict on a large tree commits."""
    return 1.0 + sum(best_tree(odds, BUSH, BUSH, topk))


def _differ(one: float, other: float) -> bool:
    return abs(math.log(one / other)) > MOVED


def _beside(advice: Advice, most: Sizes) -> Iterator[Advice]:
    """Twice and half of each size that matters, for policies whose sizes do not follow from one; and a guess more or
    less for each node: with fewer, a tree that may have only so many nodes is deeper."""
    if advice.policy not in PIECEWISE:
        return
    sizes = advice.sizes
    bounds = {"steps": most.steps, "nodes": min(MOST_NODES, most.nodes)}
    if advice.policy == "bvsp":
        bounds["branch_nodes"] = most.branch_nodes
    for name, bound in bounds.items():
        now = getattr(sizes, name)
        for other in (now // 2, min(2 * now, bound)):
            if other not in (0, now):
                yield Advice(advice.policy, replace(sizes, **{name: other}))
    for topk in (sizes.branch_topk - 1, sizes.branch_topk + 1):
        if 2 <= topk <= most.branch_topk:
            yield Advice(advice.policy, replace(sizes, branch_topk=topk))
