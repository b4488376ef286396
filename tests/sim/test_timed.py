"""The timed simulator against closed forms, and policies against the plain target."""

from __future__ import annotations

from collections import Counter

import pytest

from distspec import synthetic
from distspec.coordinator import driving
from distspec.coordinator.context import Settings
from distspec.curve import Curve
from distspec.sim.timed import PROMPT, VOCAB, Hardware, Load, Measured, TimedWorld
from distspec.speculation import load as speculation
from distspec.speculation.cost import rate
from distspec.speculation.sizes import Sizes

ODDS = (0.8, 0.1, 0.03)
T_V, T_D = 0.020, 0.0014
IDEAL = Hardware(Curve([(1, T_V)]), Curve([(1, T_D)]), hop_s=0.0)
REAL = Hardware(Curve([(1, T_V), (64, 0.022), (128, 0.024)]), Curve([(1, T_D), (64, 0.0017)]), hop_s=0.00015)
POLICIES = ("ar", "sd", "pearl", "dsi", "ssd", "bvsp")


def measure(
    policy: str, odds: tuple[float, ...] = ODDS, verifiers: int = 1, batch: int = 1, tokens: int = 12_000, **sizes: int
) -> Measured:
    settings = Settings(policy=policy, static=False, room=256, **sizes)  # type: ignore[arg-type]
    return TimedWorld(IDEAL, settings, Load(batch, odds), verifiers).measure(tokens)


@pytest.mark.parametrize("batch", [1, 8])
def test_plain_decoding_takes_a_target_step_per_token(batch: int) -> None:
    figures = measure("ar", batch=batch, tokens=200)
    assert figures.tokens_s == pytest.approx(batch / T_V, rel=0.03)
    assert figures.token_s == pytest.approx(T_V, rel=0.03)
    assert figures.target_busy == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("a", [0.5, 0.8])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_sd_takes_tau_tokens_per_draft_and_verification(a: float, k: int) -> None:
    """tau / (k t_d + t_v), tau = (1 - a^(k+1)) / (1 - a)  (arXiv 2211.17192)."""
    tau = (1 - a ** (k + 1)) / (1 - a)
    figures = measure("sd", (a,), steps=k)
    assert figures.tokens_s == pytest.approx(tau / (k * T_D + T_V), rel=0.03)
    assert figures.accepted == pytest.approx(tau - 1, rel=0.03)
    assert figures.draft_busy == pytest.approx(k * T_D / (k * T_D + T_V), rel=0.03)


@pytest.mark.parametrize("a", [0.5, 0.8])
def test_dsi_with_enough_verifiers_waits_for_one_verification_per_miss(a: float) -> None:
    """After a miss, the guess that fails next is the (e+1)-th with probability a^e (1-a). The outcome that shows it is
    that of node e, which went out with the chunk of L that it completes or is in, and the root at once: so a cycle has
    e+1 tokens and takes ceil(e/L) L t_d + t_v. E[ceil(e/L)] = sum over j of P(e > j L) = a / (1 - a^L).

    When a miss shows, the drafter is within a step that is lost: half a step on average, where anything is drafted.
    """
    lookahead, verifiers = 4, 4
    assert lookahead * verifiers * T_D >= T_V
    cycle_s = a / (1 - a**lookahead) * lookahead * T_D + T_V + a * T_D / 2
    figures = measure("dsi", (a,), verifiers, lookahead=lookahead)
    assert figures.tokens_s == pytest.approx(1 / (1 - a) / cycle_s, rel=0.03)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("topk", [1, 3])
def test_every_policy_gives_the_tokens_of_the_plain_target(policy: str, topk: int) -> None:
    load = Load(batch=5, odds=ODDS, max_tokens=40, seed=3)
    world = TimedWorld(REAL, Settings(policy=policy, topk=topk, steps=3, room=64), load, verifiers=2)
    world.run()
    for i, stream in enumerate(world.streams.values()):
        last = (i + PROMPT - 1) % VOCAB
        plain = []
        for position in range(PROMPT, PROMPT + 40):
            last = synthetic.outcome(3 + i, 0, position, last, VOCAB)
            plain.append(last)
        assert (stream.tokens, stream.finished) == (plain, "length")


@pytest.mark.parametrize("policy", POLICIES)
def test_the_seed_decides_everything(policy: str) -> None:
    def figures(seed: int) -> Measured:
        return TimedWorld(REAL, Settings(policy=policy), Load(3, ODDS, seed=seed), verifiers=2).measure(60)

    assert figures(1) == figures(1)
    assert policy == "ar" or figures(1) != figures(2)


def test_requests_of_a_batch_share_a_step_and_pay_for_its_rows() -> None:
    steep = Hardware(Curve([(1, T_V), (2, 2 * T_V)]), IDEAL.drafter, 0.0)
    alone, four = (TimedWorld(steep, Settings(policy="ar"), Load(n, ODDS)).measure(50) for n in (1, 4))
    assert alone.tokens_s == pytest.approx(four.tokens_s, rel=0.01)  # four rows take four times as long
    assert four.target_busy == pytest.approx(1.0, rel=0.03)


def test_overlap_and_trees_pay_as_they_should() -> None:
    """Coarse versions of what `bench policies --simulate` measures, at sizes known to be good."""
    sd = measure("sd", tokens=2000, steps=8).tokens_s
    tree = measure("sd", tokens=2000, steps=8, topk=4, nodes=63, max_live_nodes=500).tokens_s
    ssd = measure("ssd", tokens=1000, steps=5, nodes=16, lookahead=4, branch_width=16, max_live_nodes=256).tokens_s
    dsi = measure("dsi", tokens=2000, verifiers=4, lookahead=4).tokens_s
    assert tree > 1.15 * sd
    assert ssd > 1.1 * sd
    assert dsi > 1.15 * sd


def test_requests_that_came_apart_yield_as_much_as_those_that_came_together() -> None:
    """Of flat steps: taking turns in groups would nearly halve it."""
    rates = []
    for apart_s in (0.0, 0.003):
        settings = Settings(policy="sd", static=False, steps=1)
        world = TimedWorld(IDEAL, settings, Load(32, (0.5,), apart_s=apart_s))
        rates.append(world.measure(100, warm=40).tokens_s)
    assert rates[1] > 0.95 * rates[0]


def test_a_chunk_that_is_drafted_more_slowly_than_a_root_is_judged_seldom_goes_out() -> None:
    """So `dsi` loses most of what it gains, which the cost model knows."""
    slow = 16
    assert slow * T_D > T_V
    found = measure("dsi", verifiers=2, tokens=1000, lookahead=slow).tokens_s
    assert found < 0.75 * measure("dsi", verifiers=2, tokens=1000, lookahead=8).tokens_s
    load = speculation.Load(IDEAL.target, IDEAL.drafter, verifiers=2)
    assert rate("dsi", Sizes(lookahead=slow, nodes=slow, steps=slow), load, (ODDS,)) < 1 / T_V


def test_verifiers_share_the_work_whatever_the_policy_before() -> None:
    """A request that `dsi` bound to all of them goes on at home, and its further work is not where all others' is."""
    world = TimedWorld(REAL, Settings(policy="dsi"), Load(batch=8, odds=ODDS), verifiers=4)
    world.run(40)
    ctx = world.machine._ctx
    further = Counter(driving.preferred(ctx, request)[1] for request in ctx.requests.values())
    for request in ctx.requests.values():
        assert driving.preferred(ctx, request)[0] == request.home
        request.acting = "sd"
    homes = Counter(driving.preferred(ctx, request)[0] for request in ctx.requests.values())
    assert sorted(homes.values()) == [2, 2, 2, 2]
    assert len(further) > 1
