"""The number of drafts against a count of every possibility."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.curve import Curve
from distspec.speculation.expected import tau
from distspec.speculation.length import best_length, expected_tokens

curves = st.lists(st.floats(0.5, 10), min_size=0, max_size=6).map(Curve.doubling)
rates = st.floats(0, 1)


def by_outcome(acceptance: float, drafts: int) -> float:
    """Expected tokens of a round, summed over how many drafts in a row were right."""
    total = 0.0
    for right in range(drafts + 1):
        chance = acceptance**right * (1 - acceptance if right < drafts else 1)
        total += chance * (right + 1)
    return total


@given(rates, st.integers(0, 20))
def test_expected_tokens_is_the_sum_over_outcomes(acceptance: float, drafts: int) -> None:
    assert expected_tokens(acceptance, drafts) == pytest.approx(by_outcome(acceptance, drafts), rel=1e-6)
    assert expected_tokens(acceptance, drafts) == pytest.approx(tau(((acceptance,),), drafts), rel=1e-4)


@given(curves, rates, st.integers(1, 20))
def test_no_other_length_yields_more_tokens_per_time(curve: Curve, acceptance: float, most: int) -> None:
    def gain(drafts: int) -> float:
        return by_outcome(acceptance, drafts) / curve(drafts + 1)

    best = best_length(curve, acceptance, most)
    assert 1 <= best <= most
    assert gain(best) == pytest.approx(max(gain(k) for k in range(1, most + 1)), rel=1e-6)


@pytest.mark.parametrize(
    ("costs", "acceptance", "best"),
    [
        ((), 0.6, 8),  # nothing measured: a wider step is free
        ((1.0, 1.0, 1.0, 1.0), 0.1, 8),  # measured, and free
        ((1.0, 2.0, 4.0, 8.0), 0.9, 1),  # every row costs as much as the first: not worth it
        ((1.0, 1.06, 1.4, 2.2), 0.0, 1),  # never right
        ((1.0, 1.06, 1.4, 2.2), 1.0, 8),  # always right
        ((1.0, 1.0, 2.0, 1.0, 1.0), 0.3, 1),  # wider is not cheaper: what says so is noise
    ],
)
def test_cheap_rows_and_good_drafts_make_long_rounds(costs: tuple[float, ...], acceptance: float, best: int) -> None:
    assert best_length(Curve.doubling(costs), acceptance, 8) == best
