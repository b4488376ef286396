"""`auto` in the timed simulator, told no more than real workers tell it, against policies at good fixed sizes."""

from __future__ import annotations

from functools import cache
from itertools import takewhile
from random import Random
from typing import Any

import pytest

from distspec.bench.policies import odds
from distspec.bench.simulate import hardware
from distspec.coordinator.context import Settings
from distspec.coordinator.events import Command, Event, FromWorker
from distspec.coordinator.lifecycle import LAG
from distspec.coordinator.machine import Machine
from distspec.coordinator.planner import PROBE_TOKENS, PROBED_TOKENS, Planner
from distspec.coordinator.promises import Advice
from distspec.curve import Curve
from distspec.protocol.messages import Drafted
from distspec.sim.timed import TICK_S, Hardware, Load, TimedWorld
from distspec.sim.timed_workers import TimedTarget
from distspec.speculation.sizes import Sizes

LARGE, SMALL = hardware("h200-32b-0.6b"), hardware("h200-8b-0.6b")

FIXED: tuple[tuple[str, dict[str, int]], ...] = (
    ("ar", {}),
    ("sd", {"steps": 1}),
    ("sd", {"steps": 3}),
    ("sd", {"steps": 5}),
    ("sd", {"steps": 8}),
    ("dsi", {"lookahead": 4}),
    ("dsi", {"lookahead": 6}),
)
"""Of which one is near the best of these policies in every cell below."""

TOKENS = {1: 1500, 8: 300, 64: 80}
"""Of a request, by batch, that are enough for a rate."""

LEARNED = {1: 3600, 8: 1000, 64: 600}
"""Tokens of a request after which `auto` has measured what it began with, and some more: a measurement takes 300 tokens
and 24 steps, after 6 of each target that do not count."""


def rate(policy: str, batch: int, acceptance: float, on: Hardware = LARGE, **sizes: int) -> float:
    """Tokens per second of a policy at fixed sizes."""
    settings = Settings(policy=policy, static=False, **sizes)  # type: ignore[arg-type]
    return TimedWorld(on, settings, Load(batch, odds(acceptance))).measure(TOKENS[batch]).tokens_s


@cache
def best(batch: int, acceptance: float, on: Hardware = LARGE) -> float:
    return max(rate(policy, batch, acceptance, on, **sizes) for policy, sizes in FIXED)


def auto(
    batch: int,
    acceptance: float,
    on: Hardware = LARGE,
    claims: Curve | None = None,
    verifiers: int = 1,
    **bounds: int,
) -> TimedWorld:
    settings = Settings(policy="auto", static=False, **bounds)  # type: ignore[arg-type]
    return TimedWorld(on, settings, Load(batch, odds(acceptance)), verifiers, claims=claims)


@pytest.mark.parametrize(("batch", "acceptance"), [(1, 0.9), (8, 0.7), (64, 0.9)])
def test_it_comes_near_the_best_fixed_policy(batch: int, acceptance: float) -> None:
    """It tries others now and then while it is measured, and these runs are short."""
    found = auto(batch, acceptance).measure(TOKENS[batch], LEARNED[batch]).tokens_s
    assert found > 0.9 * best(batch, acceptance)


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_it_decodes_plainly_where_guesses_are_never_right(batch: int) -> None:
    """But for a probe now and then; at least one of each request is in what is measured."""
    figures = auto(batch, 0.02).measure(2 * (PROBE_TOKENS + PROBED_TOKENS), LEARNED[batch])
    assert figures.tokens_s > 0.97 * rate("ar", batch, 0.02)
    assert 0 < figures.draft_busy < 0.02


@pytest.mark.parametrize(("batch", "acceptance"), [(1, 0.9), (8, 0.7)])
def test_what_workers_claim_wrongly_costs_little(batch: int, acceptance: float) -> None:
    """All but the narrowest step is said to be cheaper or dearer than it is, by 20%, or by far."""
    rates = {}
    for wrong in (1.0, 0.8, 1.2, 4.0):
        claims = Curve([(rows, LARGE.target(rows) * (wrong if rows > 1 else 1.0)) for rows in (1, 2, 8, 32, 128, 256)])
        rates[wrong] = auto(batch, acceptance, claims=claims).measure(TOKENS[batch], LEARNED[batch]).tokens_s
    assert min(rates.values()) > 0.95 * rates[1.0], rates


def test_it_follows_odds_that_change() -> None:
    """Down and up again, each time near the best fixed policy of the new odds. At batch 64 rows cost, so who stays with
    what was best before comes to two thirds of it."""
    batch = 64
    world, so_far = auto(batch, 0.9), LEARNED[batch]
    shares = []
    for acceptance in (0.9, 0.4, 0.9):
        world.drift(odds(acceptance))
        found = world.measure(TOKENS[batch], so_far).tokens_s
        shares.append(found / best(batch, acceptance))
        so_far += TOKENS[batch] + 600
    assert min(shares) > 0.88, shares


def test_a_wrong_first_impression_is_left() -> None:
    """It would be best to draft, whatever the very first drafts looked like; with much to value."""
    found = auto(1, 0.8, SMALL, branch_width=32, max_live_nodes=1000, room=1000).measure(TOKENS[1], LEARNED[1]).tokens_s
    assert found > 0.93 * best(1, 0.8, SMALL)


def perturbed(on: Hardware, by: float, seed: int) -> Hardware:
    """Other hardware: every point of both curves is off by up to this share, each on its own."""
    rng = Random(seed)
    target, drafter = (
        Curve([(rows, seconds * rng.uniform(1 - by, 1 + by)) for rows, seconds in zip(c.rows, c.seconds, strict=True)])
        for c in (on.target, on.drafter)
    )
    return Hardware(target, drafter, on.hop_s)


@pytest.mark.parametrize("batch", [1, 8])
def test_it_comes_near_the_best_on_other_curves_too(batch: int) -> None:
    on = perturbed(LARGE, 0.2, seed=batch)
    assert auto(batch, 0.9, on).measure(TOKENS[batch], LEARNED[batch]).tokens_s > 0.93 * best(batch, 0.9, on)


def test_advice_is_taken_up_at_once_by_all_with_the_verifiers_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """While futures are in flight, and between two ticks: who waits for either is out of step with the others."""
    sizes = Sizes(steps=2, nodes=8, branch_nodes=8)
    few, many = Advice("ssd", sizes), Advice("bvsp", sizes)
    advised = [few]
    monkeypatch.setattr(Planner, "advise", lambda *_, **__: advised[0])
    world = auto(8, 0.9, verifiers=2)
    world.run(60)
    requests = world.machine._ctx.requests.values()
    assert all(request.acting == "ssd" and len(request.holds) == 1 for request in requests)
    for advice, holds in ((many, 2), (few, 2)):  # who has a verifier keeps it
        advised[0] = advice
        begun_s, tokens = world.now_s, sum(request.emitted for request in requests) // 8
        while world.now_s < begun_s + 2 * LARGE.target(64):
            tokens += 1
            world.run(tokens)
        assert world.now_s // TICK_S == begun_s // TICK_S
        assert all(request.acting == advice.policy and len(request.holds) == holds for request in requests)


def test_a_verifier_that_was_not_needed_for_long_computes_no_more_than_a_little_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its copy of the KV is let go meanwhile, and sent anew: all would wait for a step that makes up for it."""
    few, many = Advice("ssd", Sizes(steps=2, nodes=8)), Advice("bvsp", Sizes(steps=2, nodes=8, branch_nodes=8))
    advised, rows, begin = [many], list[int](), TimedTarget.begin

    def begun(target: TimedTarget) -> Any:
        step = begin(target)
        rows.append(step[0])
        return step

    monkeypatch.setattr(Planner, "advise", lambda *_, **__: advised[0])
    monkeypatch.setattr(TimedTarget, "begin", begun)
    world = auto(2, 0.9, verifiers=2)
    world.run(100)
    rows.clear()
    requests, tokens, holds = world.machine._ctx.requests.values(), 100, []
    for advice in (many, few, many):
        advised[0], tokens = advice, tokens + 4 * LAG
        world.run(tokens)
        holds.append([len(request.holds) for request in requests])
    assert holds == [[2, 2], [1, 1], [2, 2]]
    assert max(rows) < 2 * LAG


Told = tuple[Event, float, list[Command]]
"""An event, when it came, and what the machine wished then."""


def told(settings: Settings, on: Hardware, acceptance: float, tokens: int) -> list[Told]:
    """All that the machine of a fleet is told until its two requests have so many tokens each."""
    seen, handle = list[Told](), Machine.handle

    def handled(machine: Machine, event: Event, now_s: float) -> list[Command]:
        wishes = handle(machine, event, now_s)
        seen.append((event, now_s, list(wishes)))
        return wishes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "handle", handled)
        TimedWorld(on, settings, Load(2, odds(acceptance)), 2).run(tokens)
    return seen


def test_it_knows_what_workers_report_and_nothing_else() -> None:
    """A machine of no fleet wishes the same when it is told the same; and two fleets tell the same until a worker has
    reported some work: how fast they are and how often guesses are right shows in reports alone."""
    settings = Settings(policy="auto", static=False)
    runs = [told(settings, on, acceptance, 300) for on, acceptance in ((LARGE, 0.9), (SMALL, 0.5))]
    for run in runs:
        other = Machine(settings, 1)
        assert all(list(other.handle(event, now_s)) == wishes for event, now_s, wishes in run)
        assert any(isinstance(event, FromWorker) and isinstance(event.message, Drafted) for event, *_ in run)
    before = [list(takewhile(lambda one: not isinstance(one[0], FromWorker), run)) for run in runs]
    assert before[0] == before[1] != []
