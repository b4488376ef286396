"""What was kept of promises, and what may be hoped of others: by numbers fed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.coordinator.promises import ALL, MOVED, UNKNOWN, Advice, Hope, Promises
from distspec.speculation.sizes import Sizes

SIZE = Sizes(steps=4, nodes=8)
BUSH = Advice("bvsp", SIZE)
KEPT = st.floats(0.3, 2.0)
NOISE = 0.05
STEPS = (1, 2, 3, 4, 6, 8, 12, 16)


def hope(promises: Promises, advice: Advice) -> Hope:
    return promises.hopes([advice])[advice]


def wide(steps: int) -> Advice:
    return Advice("bvsp", replace(SIZE, steps=steps))


def doubt(found: Hope) -> float:
    """One deviation of the log."""
    return math.log(found.bold / found.kept)


def test_of_what_was_never_tried_all_is_expected_and_more_hoped() -> None:
    found = hope(Promises(), BUSH)
    assert found.kept == 1.0
    assert doubt(found) == pytest.approx(math.sqrt(UNKNOWN))


@given(kept=KEPT, noise=st.floats(0.01, 0.5))
def test_one_measurement_counts_by_what_is_known_of_it(kept: float, noise: float) -> None:
    """The mean and variance of two normal distributions multiplied."""
    promises = Promises()
    promises.learn(BUSH, kept, noise)
    known = UNKNOWN
    found = hope(promises, BUSH)
    assert math.log(found.kept) == pytest.approx(math.log(kept) * known / (known + noise**2))
    assert doubt(found) == pytest.approx(math.sqrt(known * noise**2 / (known + noise**2)))


@given(kept=KEPT)
def test_what_is_measured_often_is_believed(kept: float) -> None:
    promises = Promises()
    for _ in range(30):
        promises.learn(BUSH, kept, NOISE)
    found = hope(promises, BUSH)
    assert found.kept == pytest.approx(kept, rel=0.05)
    assert doubt(found) < NOISE / 2


@given(kept=st.floats(1.05, 2.0), near=st.sampled_from(STEPS), far=st.sampled_from(STEPS))
def test_the_nearer_sizes_are_the_more_is_known_of_them(kept: float, near: int, far: int) -> None:
    if abs(math.log2(near / SIZE.steps)) > abs(math.log2(far / SIZE.steps)):
        near, far = far, near
    promises = Promises()
    promises.learn(BUSH, kept, NOISE)
    one, other = hope(promises, wide(near)), hope(promises, wide(far))
    assert one.kept >= other.kept * (1 - 1e-9)
    assert doubt(one) <= doubt(other) * (1 + 1e-9)
    assert 1.0 < other.kept < kept


@given(kept=st.floats(1.05, 2.0), steps=st.sampled_from(STEPS))
def test_of_other_policies_only_what_all_share_is_known(kept: float, steps: int) -> None:
    promises = Promises()
    promises.learn(BUSH, kept, NOISE)
    one, other = hope(promises, wide(steps)), hope(promises, Advice("ssd", SIZE))
    assert 1.0 < other.kept < one.kept
    assert doubt(one) < doubt(other)
    assert math.log(other.kept) == pytest.approx(math.log(kept) * ALL**2 / (UNKNOWN + NOISE**2))


@given(told=st.lists(st.tuples(st.sampled_from(STEPS), KEPT), min_size=1, max_size=12))
def test_in_whatever_order_it_is_tried_more_is_known_than_before(told: list[tuple[int, float]]) -> None:
    """And what is expected lies between what was seen and what was promised."""
    promises = Promises()
    for steps, kept in told:
        promises.learn(wide(steps), kept, NOISE)
    seen = [kept for _, kept in told]
    for steps, _ in told:
        found = hope(promises, wide(steps))
        assert min(1.0, *seen) * 0.8 <= found.kept <= max(1.0, *seen) * 1.25
        assert doubt(found) < math.sqrt(UNKNOWN)


def test_when_the_world_changes_what_was_known_is_doubted_and_forgotten_in_the_end() -> None:
    promises = Promises()
    promises.learn(BUSH, 0.5, NOISE)
    before = doubt(hope(promises, BUSH))
    promises.doubt()
    assert before < doubt(hope(promises, BUSH)) < math.sqrt(UNKNOWN)
    for _ in range(math.ceil(UNKNOWN / MOVED**2)):
        promises.doubt()
    assert BUSH not in promises
    assert hope(promises, BUSH) == hope(Promises(), BUSH)


def test_what_is_not_tried_any_more_is_forgotten_too() -> None:
    promises = Promises()
    promises.learn(BUSH, 0.5, NOISE)
    other = Advice("sd", SIZE)
    for _ in range(1000):
        promises.learn(other, 1.0, NOISE)
    assert BUSH not in promises
    assert other in promises
