"""Learned odds against the odds that made the observations."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.speculation.acceptance import HALF_LIFE, PRIOR, Acceptance

ODDS = (0.8, 0.1, 0.03)


def drawn(rng: Random, odds: tuple[float, ...]) -> int | None:
    """The rank that is right."""
    point = rng.random()
    for rank, share in enumerate(odds):
        point -= share
        if point < 0:
            return rank
    return None


def watch(learned: Acceptance, rng: Random, odds: tuple[float, ...], count: int, children: int = 3) -> None:
    for _ in range(count):
        rank = drawn(rng, odds)
        learned.observe(rank if rank is not None and rank < children else None, children)


def test_nothing_seen_is_the_prior() -> None:
    assert Acceptance().shares() == pytest.approx(PRIOR)
    assert Acceptance((0.6, 0.5, 1.0)).odds() == pytest.approx((0.6, 0.2, 0.2))


@pytest.mark.parametrize("seed", range(3))
def test_odds_are_found(seed: int) -> None:
    learned = Acceptance()
    watch(learned, Random(seed), ODDS, 4000)
    assert learned.odds()[:3] == pytest.approx(ODDS, abs=0.04)


@pytest.mark.parametrize("seed", range(3))
def test_drift_is_followed(seed: int) -> None:
    rng, learned = Random(seed), Acceptance()
    watch(learned, rng, (0.9, 0.05, 0.01), 4000)
    watch(learned, rng, (0.4, 0.3, 0.1), 4 * HALF_LIFE)
    assert learned.odds()[:3] == pytest.approx((0.4, 0.3, 0.1), abs=0.08)


def test_half_life() -> None:
    learned = Acceptance()
    for _ in range(20 * HALF_LIFE):
        learned.observe(0, 1)
    for _ in range(HALF_LIFE):
        learned.observe(None, 1)
    assert learned.odds()[0] == pytest.approx(0.5, abs=0.01)


def test_ranks_that_were_not_there_say_nothing() -> None:
    learned = Acceptance()
    watch(learned, Random(1), ODDS, 1000, children=1)
    assert learned.shares()[1:] == pytest.approx(PRIOR[1:])
    assert learned.tried(1) == 0


def test_what_is_known_of_a_rank_is_kept_while_nobody_tries_it() -> None:
    """And it is told relative to the misses of those before, so they may drift meanwhile."""
    learned = Acceptance()
    watch(learned, Random(1), (0.8, 0.16, 0.03), 4000)
    watch(learned, Random(2), (0.2,), 8000, children=1)
    assert learned.odds()[:2] == pytest.approx((0.2, 0.64), abs=0.06)


@given(st.lists(st.none() | st.integers(0, 4), min_size=1, max_size=50))
def test_without_forgetting_the_order_of_observations_does_not_count(seen: list[int | None]) -> None:
    known = []
    for order in (seen, seen[::-1]):
        learned = Acceptance(half_life=math.inf)
        for rank in order:
            learned.observe(rank, 5)
        known.append(learned.odds())
    assert known[0] == pytest.approx(known[1])


@given(st.lists(st.tuples(st.none() | st.integers(0, 6), st.integers(0, 7)), max_size=200))
def test_odds_are_odds(seen: list[tuple[int | None, int]]) -> None:
    learned = Acceptance()
    for one in seen:
        learned.observe(*one)
    assert all(0 <= share <= 1 for share in learned.odds())
    assert sum(learned.odds()) <= 1 + 1e-9


@given(st.lists(st.tuples(st.none() | st.integers(0, 4), st.integers(0, 5)), max_size=50))
def test_being_asked_changes_nothing(seen: list[tuple[int | None, int]]) -> None:
    asked, silent = Acceptance(), Acceptance()
    for one in seen:
        asked.odds()
        asked.observe(*one)
        silent.observe(*one)
    assert asked.odds() == silent.odds() == asked.odds()


def test_counts_never_overflow_and_rescaling_changes_nothing() -> None:
    learned = Acceptance()
    for i in range(45 * HALF_LIFE):  # past 2**40
        learned.observe(0 if i % 4 else None, 1)
    assert learned.odds()[0] == pytest.approx(0.75, abs=0.01)
    assert learned.tried(0) == pytest.approx(HALF_LIFE / 0.693, rel=0.01)
