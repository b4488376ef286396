"""Latency curves against what they were made of, and how they follow a machine that changes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.curve import GENERATION, STALE, Curve, Latency, Transport, quantile
from distspec.errors import InvalidValue

points = st.dictionaries(st.integers(1, 512), st.floats(1e-4, 1.0), min_size=1, max_size=8).map(lambda d: [*d.items()])
rows = st.integers(1, 2048)


@given(points, rows, rows)
def test_wider_is_never_cheaper(known: list[tuple[int, float]], a: int, b: int) -> None:
    curve = Curve(known)
    assert curve(min(a, b)) <= curve(max(a, b)) * (1 + 1e-9)


@given(points, rows)
def test_a_cost_lies_between_its_neighbours_and_never_below_the_widest(known: list[tuple[int, float]], at: int) -> None:
    costs = sorted(cost for _, cost in known)
    rising = Curve(zip(sorted(row for row, _ in known), costs, strict=True))
    for (row, cost), (wider, more) in zip(
        zip(rising.rows, costs, strict=True), zip(rising.rows[1:], costs[1:], strict=True), strict=False
    ):
        assert rising(row) == pytest.approx(cost)
        if row <= at <= wider:
            assert cost * (1 - 1e-9) <= rising(at) <= more * (1 + 1e-9)
    if at >= rising.rows[-1]:
        assert rising(at) >= costs[-1] * (1 - 1e-9)


def test_beyond_the_widest_goes_on_as_before_it() -> None:
    assert Curve([(1, 1.0), (2, 1.5), (4, 2.5)])(8) == pytest.approx(4.5)
    assert Curve.doubling((1.0, 1.5, 2.5))(8) == pytest.approx(4.5)


def test_noise_is_shared_between_neighbours() -> None:
    curve = Curve([(1, 1.0), (2, 3.0), (4, 2.0), (8, 4.0)])
    assert [curve(n) for n in (1, 2, 3, 4, 8)] == pytest.approx([1.0, 2.5, 2.5, 2.5, 4.0])


@pytest.mark.parametrize("bad", [[], [(0, 1.0)], [(1, 0.0)], [(1, float("nan"))], [(1, float("inf"))]])
def test_no_curve_of_nonsense(bad: list[tuple[int, float]]) -> None:
    with pytest.raises(InvalidValue):
        Curve(bad)


def observed(latency: Latency, truth: Curve, rng: Random, count: int, widths: tuple[int, ...]) -> None:
    """Steps with 5% noise, of which one in ten takes five times as long."""
    for i in range(count):
        width = widths[i % len(widths)]
        latency.observe(width, truth(width) * rng.gauss(1, 0.05) * (5 if rng.random() < 0.1 else 1))


TRUTH = Curve([(1, 0.0051), (8, 0.0057), (64, 0.006), (128, 0.0064), (256, 0.0087)])


@pytest.mark.parametrize("shape", [None, Curve.doubling((1.0, 1.0, 1.1, 1.2, 1.3, 1.3, 1.4, 1.5, 1.9))])
@pytest.mark.parametrize("seed", range(5))
def test_observations_make_a_curve_in_seconds(shape: Curve | None, seed: int) -> None:
    latency = Latency(shape)
    assert not latency.is_known
    observed(latency, TRUTH, Random(seed), 120, (1, 9, 60, 120, 250))
    assert latency.is_known
    for width in (1, 9, 60, 120, 200, 250):
        assert latency.curve()(width) == pytest.approx(TRUTH(width), rel=0.06)


@pytest.mark.parametrize("factor", [0.8, 1.2])
@pytest.mark.parametrize("seed", range(5))
def test_twenty_steps_tell_of_a_new_speed(factor: float, seed: int) -> None:
    rng, latency = Random(seed), Latency(TRUTH)
    observed(latency, TRUTH, rng, 300, (6,))
    slower = Curve(zip(TRUTH.rows, [cost * factor for cost in TRUTH.seconds], strict=True))
    observed(latency, slower, rng, 20, (6,))
    assert latency.curve()(6) == pytest.approx(slower(6), rel=0.06)
    assert latency.curve()(200) == pytest.approx(slower(200), rel=0.06), "widths that were never seen follow"


@pytest.mark.parametrize("shape", [None, TRUTH])
def test_widths_that_are_not_seen_any_more_follow_those_that_are(shape: Curve | None) -> None:
    """At the ratio that they had to each other when both were seen."""
    latency = Latency(shape)
    for _ in range(20):
        latency.observe(256, TRUTH(256))
    for slower in (1, 2, 3):
        for _ in range(2 * STALE):
            latency.observe(1, slower * TRUTH(1))
            latency.curve()
        assert latency.curve()(256) == pytest.approx(slower * TRUTH(256))


@pytest.mark.parametrize("bad", [(0, 1.0), (-1, 1.0), (2**20, 1.0), (1, 0.0), (1, float("nan")), (1, float("inf"))])
def test_nonsense_is_not_learned(bad: tuple[int, float]) -> None:
    latency = Latency()
    latency.observe(*bad)
    assert not latency.is_known


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(1e-6, 10)), max_size=60))
def test_whatever_is_observed_makes_a_curve(steps: list[tuple[int, float]]) -> None:
    latency = Latency()
    for step in steps:
        latency.observe(*step)
    costs = [latency.curve()(n) for n in (1, 2, 3, 7, 64, 1000, 5000)]
    assert costs == sorted(costs)
    assert costs[0] > 0


def test_transport_is_what_turnarounds_have_in_common() -> None:
    rng, transport = Random(1), Transport()
    assert transport.seconds == 0.0
    for _ in range(200):
        transport.observe(0.020 + 0.0003 * rng.uniform(1, 1.2) + rng.choice((0, 0, 0.01)), 0.020)
    assert transport.seconds == pytest.approx(0.0003, rel=0.15)
    transport.observe(0.0, 1.0)
    assert transport.seconds == 0.0, "clocks that disagree give no time below nothing"


def test_a_way_that_grew_longer_is_noticed() -> None:
    transport = Transport()
    transport.observe(1.001, 1.0)
    for _ in range(2 * GENERATION):
        transport.observe(1.005, 1.0)
    assert transport.seconds == pytest.approx(0.005)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_quantiles_rise(values: list[float]) -> None:
    shares = [quantile(values, share / 10) for share in range(11)]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (min(values), max(values))
