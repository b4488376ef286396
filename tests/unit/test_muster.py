"""A step waits for requests that will soon be back where that serves more requests per second, and only then."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distspec.muster import GRACE, Muster

FLAT_S = 0.02


def muster(step_s: float, away: int, delay_s: float, row_s: float = 0.0) -> Muster:
    """Steps take step_s and row_s per row; requests 0 .. away-1 were answered at second 100."""
    subject = Muster()
    for rows in (1, 2, 4, 8, 16, 32, 64, 128):
        subject.stepped(rows, step_s + row_s * rows)
    for i in range(10):
        subject.answered(1000, 1, float(i))
        subject.returned(1000, i + delay_s)
    for request in range(away):
        subject.answered(request, 1, 100.0)
    return subject


@given(ready=st.integers(1, 64), away=st.integers(1, 64), delay_s=st.floats(0.001, 0.1))
def test_of_flat_steps_it_waits_where_those_who_come_are_a_greater_share_than_the_wait(
    ready: int, away: int, delay_s: float
) -> None:
    wait_s = muster(FLAT_S, away, delay_s / (1 + GRACE)).wait_s(ready, ready, 100.0)
    gain = (ready + away) / ready / ((delay_s + FLAT_S) / FLAT_S)
    if gain > 1.02:
        assert abs(wait_s - delay_s) < 1e-9
    elif gain < 1.0:
        assert wait_s == 0.0


def test_where_rows_cost_what_they_bring_nobody_waits() -> None:
    assert muster(1e-6, 32, 0.001, row_s=0.001).wait_s(32, 32, 100.0) == 0.0


def test_who_is_late_is_waited_for_no_longer_than_anybody_was_away() -> None:
    subject = muster(FLAT_S, 32, 0.005)
    assert subject.wait_s(32, 32, 100.005) > 0.0
    assert subject.wait_s(32, 32, 100.006) == 0.0


@given(delay_s=st.floats(0.001, 0.1), later=st.floats(0.0, 0.9 * GRACE))
def test_a_wait_is_not_given_up_just_before_they_come(delay_s: float, later: float) -> None:
    """However often the worker looks, whoever comes a little later than those before is still waited for."""
    subject, now_s = muster(FLAT_S, 63, delay_s), 100.0
    while now_s < 100.0 + delay_s * (1 + later):
        wait_s = subject.wait_s(1, 1, now_s)
        assert wait_s > 0.0
        now_s += wait_s


def test_nobody_waits_for_those_who_are_there_or_gone_nor_without_work() -> None:
    subject = muster(FLAT_S, 2, 0.005)
    assert subject.wait_s(0, 0, 100.0) == 0.0
    assert subject.wait_s(1, 1, 100.0) > 0.0
    subject.returned(0, 100.001)
    subject.left(1)
    assert subject.wait_s(1, 1, 100.001) == 0.0


def test_the_latest_delays_count() -> None:
    subject = muster(FLAT_S, 0, 0.001)
    for i in range(200, 300):
        subject.answered(7, 1, float(i))
        subject.returned(7, i + 0.01)
    subject.answered(0, 1, 300.0)
    assert abs(subject.wait_s(1, 1, 300.0) - 0.01 * (1 + GRACE)) < 1e-6
