"""Metrics add up, whatever the order, and refuse what would spoil them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.metrics import Registry


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 100))))
def test_a_counter_is_the_sum_of_what_was_added(adds: list[tuple[str, int]]) -> None:
    registry = Registry()
    counter = registry.counter("tokens", "t", ["role"])
    for role, amount in adds:
        counter.add(amount, role=role)
    (family,) = registry.snapshot()
    assert {s.labels["role"]: s.value for s in family.samples} == {
        role: sum(n for r, n in adds if r == role) for role in {r for r, _ in adds}
    }


@given(st.lists(st.floats(-5, 5)))
def test_a_histogram_counts_each_value_once_in_its_bucket(values: list[float]) -> None:
    bounds = (-1.0, 0.0, 2.0)
    registry = Registry()
    histogram = registry.histogram("h", "h", bounds=bounds)
    for value in values:
        histogram.observe(value)
    (family,) = registry.snapshot()
    if not values:
        assert family.samples == ()
        return
    (sample,) = family.samples
    assert sample.value == pytest.approx(sum(values))
    for i, bound in enumerate(bounds):
        assert sum(sample.counts[: i + 1]) == sum(value <= bound for value in values)
    assert sum(sample.counts) == len(values)


def test_a_snapshot_does_not_change_afterwards() -> None:
    registry = Registry()
    gauge = registry.gauge("free", "pages")
    gauge.set(3)
    before = registry.snapshot()
    gauge.set(5)
    assert before[0].samples[0].value == 3
    assert registry.snapshot()[0].samples[0].value == 5
    gauge.clear()
    assert registry.snapshot()[0].samples == ()


def test_wrong_labels_negative_amounts_and_second_metrics_are_refused() -> None:
    registry = Registry()
    counter = registry.counter("n", "n", ["role"])
    with pytest.raises(ValueError, match="has the labels"):
        counter.add(1)
    with pytest.raises(ValueError, match="is a counter"):
        counter.add(-1, role="a")
    with pytest.raises(ValueError, match="exists"):
        registry.gauge("n", "n")
