"""Rows in which values meet: all that should, few rows, the same ones each time."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.covering import covering

SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=5)


@settings(max_examples=30)
@given(SIZES, st.integers(0, 99), st.data())
def test_values_meet_in_pairs_and_in_groups(sizes: list[int], seed: int, data: st.DataObject) -> None:
    dimensions = [tuple(f"{i}{value}" for value in range(size)) for i, size in enumerate(sizes)]
    group = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=2, max_size=3, unique=True))
    rows = covering(*dimensions, groups=[group], seed=seed)
    for meeting in [*combinations(range(len(sizes)), 2), tuple(group)]:
        met = {tuple(row[i] for i in meeting) for row in rows}
        assert met == set(product(*(dimensions[i] for i in meeting)))
    assert len(rows) <= prod(sizes)
    assert len(set(rows)) == len(rows)


def test_rows_are_few() -> None:
    """No pair of the largest two dimensions can share a row; a third one fits in between."""
    assert len(covering(range(6), range(5), range(3))) == 30
    assert len(covering(*[range(3)] * 4)) <= 12


def test_the_seed_decides() -> None:
    dimensions = [range(4)] * 4
    assert covering(*dimensions, seed=1) == covering(*dimensions, seed=1) != covering(*dimensions, seed=2)
