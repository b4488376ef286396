"""What `auto` is advised: by a fake clock, tokens fed by hand, and the real cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.coordinator.planner import (
    CROWD,
    LEAST,
    PATIENCE,
    PLAIN,
    PROBE_TOKENS,
    PROBED_TOKENS,
    Planner,
)
from distspec.coordinator.promises import Advice
from distspec.curve import Curve
from distspec.protocol.messages import Hello
from distspec.speculation.branches import Valuing
from distspec.speculation.cost import rate, value
from distspec.speculation.expected import Odds
from distspec.speculation.grid import candidates
from distspec.speculation.load import Load
from distspec.speculation.sizes import Sizes

KIND = (True,)
T_V, T_D, HOP_S = 0.020, 0.0014, 0.0003
MOST = Sizes(steps=8, nodes=8, lookahead=8, branch_width=4, max_live_nodes=16)
SMALL = Sizes(steps=2, nodes=4, lookahead=2, branch_topk=2, branch_width=2, max_live_nodes=8, branch_nodes=4)
POLICIES = ("ar", "sd", "pearl", "dsi", "ssd", "bvsp")
QUICK = ("ar", "sd", "pearl", "dsi")
"""Policies that are valued in no time."""

PIECES = 8
"""Of the valuing that are done before each question."""


def best(policies: Sequence[str], most: Sizes, load: Load, odds: Odds) -> float:
    """The most that is promised."""
    some = [("ar", most)] * ("ar" in policies) + list(candidates(policies, most))
    return max(rate(policy, sizes, load, odds) for policy, sizes in some)


def judge(planner: Planner, share: float, nodes: int) -> None:
    """So many first guesses of which this share was right, spread evenly."""
    for i in range(nodes):
        is_right = int((i + 1) * share) > int(i * share)
        planner.judged(KIND, 0 if is_right else None, 1)


def plain(planner: Planner, steps: int, begin_s: float = 0.0) -> None:
    """Plain decoding of one request."""
    for i in range(1, steps + 1):
        planner.stepped("decode0", False, (1, T_V), begin_s + i * T_V)


def step(planner: Planner, count: int = 30, begin_s: float = 0.0) -> None:
    """Steps of a flat target and a flat drafter, and messages between them."""
    for i in range(1, count + 1):
        planner.stepped("decode0", False, (1 + i % 9, T_V), begin_s + i * T_V)
        planner.stepped("draft0", True, (1, T_D), begin_s + i * T_V)
        planner.turned(T_V + HOP_S, (0.0, T_V))


def informed(share: float, most: Sizes = MOST) -> Planner:
    """A planner that has seen enough to value policies."""
    planner = Planner(most)
    step(planner)
    judge(planner, share, 500)
    return planner


def load(running: int = 1, verifiers: int = 1) -> Load:
    """What an informed planner has seen."""
    return Load(Curve([(1, T_V)]), Curve([(1, T_D)]), HOP_S, running, verifiers)


class Fleet:
    """A planner, a clock, and tokens that come at the rate which `yields` says of the advice."""

    def __init__(
        self, planner: Planner, yields: Callable[[Advice], float], policies: Sequence[str] = QUICK, verifiers: int = 1
    ) -> None:
        self.planner, self.yields, self.policies, self.verifiers = planner, yields, policies, verifiers
        self.now_s, self.tokens = 0.0, 0.0
        self.advice = self.ask()

    def ask(self, running: int = 1) -> Advice:
        self.planner.think(PIECES)
        return self.planner.advise(
            KIND, running, self.verifiers, 1, self.policies, now_s=self.now_s, tokens=int(self.tokens)
        )

    def rate(self, asks: int, yields: Callable[[Advice], float] | None = None) -> float:
        """Tokens per second of the advice that is given, the trying included; or of what else it would yield."""
        total = 0.0
        for _ in range(asks):
            self.run(1)
            total += (yields or self.yields)(self.advice)
        return total / asks

    def run(self, asks: int) -> Counter[str]:
        """How often each policy was advised, asked every tenth of a second."""
        advised: Counter[str] = Counter()
        for _ in range(asks):
            self.now_s += 0.1
            self.tokens += 0.1 * self.yields(self.advice)
            for i in range(round(0.1 * self.verifiers / T_V)):
                self.planner.stepped("decode0", False, (1, T_V), self.now_s + i * 1e-3)
            self.advice = self.ask()
            advised[self.advice.policy] += 1
        return advised


def promised(advice: Advice, share: float, verifiers: int = 1) -> float:
    return rate(advice.policy, advice.sizes, load(verifiers=verifiers), ((share,),))


# -- before anything is known ------------------------------------------------------------------------


@given(steps=st.integers(0, LEAST - 1), allowed=st.sets(st.sampled_from(POLICIES)), most=st.sampled_from([MOST, SMALL]))
def test_advice_is_cheap_before_much_is_seen(steps: int, allowed: set[str], most: Sizes) -> None:
    """First plain decoding, so that narrow steps are timed; then short chains, with branches where that may be."""
    planner = Planner(most)
    plain(planner, steps)
    advice = planner.advise(KIND, 1, 1, 1, sorted(allowed), now_s=0.0, tokens=0)
    if steps < PLAIN or not allowed & {"sd", "ssd"}:
        assert advice.policy == "ar"
    else:
        assert advice.policy == ("ssd" if "ssd" in allowed else "sd")
        assert (advice.sizes.topk, advice.sizes.steps) == (1, min(4, most.steps))
        assert advice.sizes.nodes <= 4


@pytest.mark.parametrize("policies", [QUICK, POLICIES])
def test_a_drafter_that_was_never_timed_is_tried_first(policies: Sequence[str]) -> None:
    planner = Planner(MOST)
    plain(planner, LEAST)
    assert planner.advise(KIND, 1, 1, 1, policies, now_s=0.0, tokens=0).policy in ("sd", "ssd")


def test_a_step_counts_once_however_many_requests_report_it() -> None:
    planner = Planner(MOST)
    for _ in range(2 * LEAST):
        planner.stepped("decode0", False, (64, T_V), 1.0)
    assert planner.advise(KIND, 64, 1, 1, POLICIES, now_s=0.0, tokens=0).policy == "ar"


def test_what_a_worker_claims_is_a_shape_not_seconds() -> None:
    """However wide steps are claimed to cost, and in whatever unit: what was timed is what counts."""
    advised = []
    for unit in (1.0, 1000.0):
        planner = Planner(MOST)
        hello = Hello(
            worker="decode0",
            role="decode",
            incarnation=1,
            fingerprint={},
            slots=4,
            capacity=64,
            page_size=1,
            max_model_len=64,
            vocab_size=8,
            step_cost=(unit, unit * 1.1, unit * 1.2, unit * 1.5),
        )
        planner.joined(hello)
        step(planner)
        judge(planner, 0.8, 500)
        fleet = Fleet(planner, lambda advice: 100.0)
        fleet.run(100)
        advised.append(fleet.advice)
    assert advised[0] == advised[1]


# -- valuing -----------------------------------------------------------------------------------------


def spy(monkeypatch: pytest.MonkeyPatch) -> tuple[Counter[str], set[str]]:
    """Counts what the real valuing does: pieces in all, and which policies are valued."""
    pieces: Counter[str] = Counter()
    valued: set[str] = set()

    def counting(policy: str, sizes: Sizes, load: Load, odds: tuple[tuple[float, ...], ...]) -> Valuing:
        valued.add(policy)
        valuing = value(policy, sizes, load, odds)
        while True:
            pieces["all"] += 1
            try:
                next(valuing)
            except StopIteration as done:
                found: float = done.value
                return found
            yield

    monkeypatch.setattr("distspec.coordinator.advisor.value", counting)
    return pieces, valued


def test_valuing_goes_on_by_as_many_pieces_as_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else does any of it; it comes to an end, and says so."""
    pieces, valued = spy(monkeypatch)
    fleet = Fleet(informed(0.8), lambda advice: 100.0, POLICIES, verifiers=2)
    for most in (0, 1, PIECES):
        before = pieces["all"]
        fleet.planner.think(most)
        fleet.planner.advise(KIND, 1, 2, 1, POLICIES, now_s=0.0, tokens=0)
        assert pieces["all"] - before == most
    assert fleet.planner.is_valuing
    fleet.planner.think(1 << 30)
    assert not fleet.planner.is_valuing
    assert valued == set(POLICIES)


@pytest.mark.parametrize("verifiers", [1, 3])
def test_a_policy_for_idle_verifiers_is_not_valued_in_a_crowd(monkeypatch: pytest.MonkeyPatch, verifiers: int) -> None:
    _, valued = spy(monkeypatch)
    for running, is_valued in ((CROWD * verifiers, True), (CROWD * verifiers + 1, False)):
        fleet = Fleet(informed(0.8, SMALL), lambda advice: 100.0, POLICIES, verifiers)
        valued.clear()
        for _ in range(500):
            fleet.ask(running)
        assert ("bvsp" in valued) is is_valued
        assert {*QUICK, "ssd"} <= valued


@settings(max_examples=20, deadline=None)
@given(share=st.floats(0.02, 0.95), verifiers=st.integers(1, 4))
def test_where_promises_are_kept_the_best_of_the_cost_model_is_advised(share: float, verifiers: int) -> None:
    fleet = Fleet(informed(share), partial(promised, share=share, verifiers=verifiers), verifiers=verifiers)
    fleet.run(400)
    assert fleet.rate(200) > 0.95 * best(QUICK, MOST, load(verifiers=verifiers), ((share,),))


def test_new_odds_lead_to_new_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, _ = spy(monkeypatch)
    planner = informed(0.9)
    fleet = Fleet(planner, lambda advice: promised(advice, 0.9), ("ar", "sd"))
    fleet.run(200)
    before, valued = fleet.advice, pieces["all"]
    judge(planner, 0.9, 2 * PATIENCE)
    step(planner, begin_s=1000.0)
    fleet.run(50)
    assert fleet.advice == before
    assert pieces["all"] < valued + MOST.steps  # nothing moved: but for some measurements, nothing is valued again
    judge(planner, 0.4, 4 * PATIENCE)
    fleet.yields = lambda advice: promised(advice, 0.4)
    fleet.run(200)
    assert pieces["all"] > valued
    assert fleet.advice.sizes.steps < before.sizes.steps


# -- promises ----------------------------------------------------------------------------------------


def test_who_yields_less_than_promised_is_left_and_come_back_to() -> None:
    shares = {"sd": 1.0, "dsi": 0.5}
    fleet = Fleet(
        informed(0.8),
        lambda advice: shares.get(advice.policy, 1.0) * promised(advice, 0.8, 4),
        ("ar", "sd", "dsi"),
        verifiers=4,
    )
    assert fleet.run(100)["dsi"]  # what promises the most is tried
    fleet.run(400)
    assert fleet.run(200)["sd"] > 180
    shares["sd"], shares["dsi"] = 0.4, 1.0
    fleet.run(400)
    assert fleet.run(200)["dsi"] > 180


def test_one_wide_trial_speaks_for_all_wide_sizes() -> None:
    """Narrow steps cost the same, wide ones twice as much: what one trial shows of them, all promises know."""
    most, odds = Sizes(steps=5, topk=3, nodes=64, lookahead=2, branch_width=4, max_live_nodes=64), ((0.5, 0.3, 0.1),)
    real = replace(load(), target=Curve([(10, T_V), (40, 2 * T_V)]))
    planner = Planner(most)
    step(planner)
    for i in range(500):
        planner.judged(KIND, (0, 1, 0, 1, 0, 2, 0, 1, 0, None)[i % 10], 3)
    fleet, wide = (
        Fleet(planner, lambda advice: rate(advice.policy, advice.sizes, real, odds), ("ar", "sd")),
        set[Sizes](),
    )
    for _ in range(200):
        rows = fleet.advice.sizes.nodes + 1 if fleet.advice.policy == "sd" else 1
        planner.stepped("decode0", False, (rows, real.target(rows)), fleet.now_s)
        if rows > 30:
            wide.add(fleet.advice.sizes)
        fleet.run(1)
    assert len(wide) == 1
    assert fleet.rate(1) > 0.97 * best(["ar", "sd"], most, real, odds)


KEPT = st.fixed_dictionaries({policy: st.floats(0.7, 1.0) for policy in ("sd", "pearl", "dsi")})
"""What share of a promise is kept."""


def top(kept: dict[str, float], share: float) -> float:
    return max(best(["ar", policy], MOST, load(verifiers=4), ((share,),)) * part for policy, part in kept.items())


@settings(max_examples=25, deadline=None)
@given(kept=KEPT)
def test_what_is_advised_in_the_end_is_near_the_best_of_what_is_really_there(kept: dict[str, float]) -> None:
    def real(advice: Advice) -> float:
        return kept.get(advice.policy, 1.0) * promised(advice, 0.8, 4)

    fleet = Fleet(informed(0.8), real, verifiers=4)
    fleet.run(1200)
    assert fleet.rate(400) > 0.97 * top(kept, 0.8)  # of so many, what is tried now and then takes its usual share


def tried_by_luck(seed: int) -> float:
    """What comes of advice after a while, as a share of the best, where guesses are right with 0.7 or with 0.9, at
    random, half a second each: four of these make a measurement."""
    rng, lucky = Random(seed), 0.8
    kept = {policy: rng.uniform(0.8, 1.0) for policy in ("sd", "pearl", "dsi")}

    def real(advice: Advice, share: float) -> float:
        return kept.get(advice.policy, 1.0) * promised(advice, share, 4)

    fleet, total = Fleet(informed(0.8), lambda advice: real(advice, lucky), verifiers=4), 0.0
    for i in range(600):
        if i % 5 == 0:
            lucky = rng.choice((0.7, 0.9))
        judge(fleet.planner, lucky, 10)
        found = fleet.rate(1, lambda advice: real(advice, 0.8))
        total += found if i >= 300 else 0.0
    return total / 300 / top(kept, 0.8)


def test_luck_with_guesses_does_not_choose() -> None:
    """Where measurements count as they are, it is 0.98."""
    shares = [tried_by_luck(seed) for seed in range(6)]
    assert sum(shares) / len(shares) > 0.99, shares


# -- probing -----------------------------------------------------------------------------------------


@given(most=st.builds(Sizes, steps=st.integers(1, 16), topk=st.integers(1, 8), nodes=st.integers(1, 64)))
def test_a_probe_costs_little(most: Sizes) -> None:
    advice = Planner(most).probe(POLICIES)
    assert advice.policy == "sd"
    assert advice.sizes.topk == 1
    assert advice.sizes.nodes == min(2, most.nodes)
    assert advice.sizes.steps == min(2, most.steps)
    assert Planner(most).probe(("ar", "dsi")).policy == "ar"


def test_probes_are_rare() -> None:
    assert 10 * PROBED_TOKENS < PROBE_TOKENS
