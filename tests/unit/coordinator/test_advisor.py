"""Which trials are made, how long they take, and what they cost: by made-up values and yields, on a fake clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from distspec.coordinator.advisor import EARNED, SETTLE_STEPS, TRIALS, WINDOW_STEPS, Advisor, Facts, Seen
from distspec.coordinator.promises import Advice
from distspec.curve import Curve
from distspec.speculation.branches import Valuing
from distspec.speculation.load import Load
from distspec.speculation.sizes import Sizes

Rates = Callable[[Advice], float]
"""Tokens per second of an advice."""

MOST = Sizes(steps=16, nodes=64, lookahead=16)
PLAIN = Advice("ar", MOST)
STEP_S = 0.02
SD, DSI, BUSH = (Advice(policy, Sizes(steps=4, nodes=8)) for policy in ("sd", "dsi", "bvsp"))
MANY = [Advice(p, Sizes(steps=k, nodes=k)) for p in ("sd", "dsi", "pearl", "ssd", "bvsp") for k in range(1, 17)]


@dataclass(frozen=True, slots=True)
class Claims(Facts):
    """Facts by which advice is worth what it is said to be."""

    claims: Rates

    def value(self, advice: Advice) -> Valuing:
        yield
        return self.claims(advice)


class Fleet:
    """One target whose steps bring what advice really yields; advice is asked for at each."""

    def __init__(self, claims: Rates, yields: Rates, some: Sequence[Advice]) -> None:
        load = Load(Curve([(1, STEP_S)]), Curve([(1, STEP_S)]), 0.0, 8)
        self.facts = Claims(load, ((0.8,),), claims)
        self.yields = yields
        self.advisor = Advisor(self.facts, ((one.policy, one.sizes) for one in some), PLAIN, 0, False)
        self.steps, self.tokens, self.judged = 0, 0.0, Counter[tuple[int | None, int]]()
        self.probes = 0

    def run(self, steps: int) -> Counter[Advice]:
        """How many steps were taken by each advice."""
        taken = Counter[Advice]()
        for _ in range(steps):
            advice = self.advisor.advice or PLAIN
            taken[advice] += 1
            self.steps += 1
            self.tokens += STEP_S * self.yields(advice)
            now = Seen(self.steps * STEP_S, int(self.tokens), self.steps, self.judged, self.probes)
            result = self.advisor.measure(now, 1)
            if result is not None:
                self.advisor.learn(result, self.facts, self.facts.odds)
            self.advisor.go_on(0 if self.advisor.is_done else 1000)
        return taken


def of(rates: dict[Advice, float]) -> Rates:
    return lambda advice: rates.get(advice, 500.0)


def test_a_trial_ends_the_sooner_the_worse_it_is() -> None:
    """What promises nearly as much as the best is tried once; a few steps are enough where little comes of it."""
    claims = of({SD: 1000.0, DSI: 980.0})
    whole = SETTLE_STEPS + WINDOW_STEPS
    took = {
        kept: Fleet(claims, of({SD: 1000.0, DSI: kept * 980.0}), [SD, DSI]).run(400)[DSI] for kept in (0.1, 0.4, 0.9)
    }
    assert SETTLE_STEPS < took[0.1] <= took[0.4] < took[0.9]
    assert took[0.4] < 0.7 * whole
    assert took[0.9] >= whole


def test_who_keeps_the_best_promise_is_tried_by_nobody_else() -> None:
    """Nothing is tried that cannot be hoped to be better."""
    rates = of({SD: 1000.0, DSI: 800.0})
    assert Fleet(rates, rates, [SD, DSI]).run(1000)[DSI] == 0


def test_what_requests_do_to_probe_is_not_held_against_what_is_advised() -> None:
    """Probes that all make at once, a few steps in a hundred, bring a third of what is advised."""
    rates = {PLAIN: 1000.0, SD: 900.0}
    fleet = Fleet(of(rates), of(rates), [SD])
    plain = fleet.yields
    fleet.run(4 * WINDOW_STEPS)
    for _ in range(20):
        fleet.yields = lambda advice: plain(advice) / (3 if advice == PLAIN else 1)
        for _ in range(WINDOW_STEPS):
            fleet.probes += 1
            fleet.run(1)
        fleet.yields = plain
        assert fleet.run(4 * WINDOW_STEPS)[PLAIN] == 4 * WINDOW_STEPS


@pytest.mark.parametrize("kept", [0.97, 0.8, 0.5])
def test_trials_that_turn_out_worse_are_few(kept: float) -> None:
    """Of very many that promise as much as the best, and yield less: what they cost is a small share of all."""
    best = MANY[0]
    claims = of(dict.fromkeys(MANY, 1000.0))
    fleet = Fleet(claims, lambda advice: claims(advice) * (1.0 if advice == best else kept), MANY)
    fleet.run(100 * round(TRIALS))
    steps = 4_000
    taken = fleet.run(steps)
    assert (steps - taken[best]) * (1 - kept) < EARNED / 2 * steps
    assert taken[best] > steps / 2


def test_what_was_left_once_is_come_back_to_though_nothing_else_has_changed() -> None:
    rates = {SD: 1000.0, DSI: 500.0}
    fleet = Fleet(of({SD: 1000.0, DSI: 1200.0}), of(rates), [SD, DSI])
    fleet.run(1000)
    assert fleet.run(1000)[SD] == 1000
    rates[DSI] = 1200.0
    fleet.run(400 * WINDOW_STEPS)
    assert fleet.run(1000)[DSI] > 900


def test_sizes_beside_the_best_are_found_one_after_the_other() -> None:
    """What is worth comparing anywhere has 8 nodes, a second verifier at 16, 3 guesses; here 32, 2, 2 are best."""

    def rates(advice: Advice) -> float:
        sizes = advice.sizes
        if advice.policy != "bvsp":
            return 100.0
        away = abs(math.log2(sizes.nodes / 32)) + abs(math.log2(sizes.branch_nodes / 2)) + sizes.branch_topk - 2
        return 1000.0 * math.pow(0.9, away)

    fleet = Fleet(rates, rates, [BUSH])
    fleet.run(3000)
    advice = fleet.advisor.advice
    assert advice is not None
    assert (advice.sizes.nodes, advice.sizes.branch_nodes, advice.sizes.branch_topk) == (32, 2, 2)
