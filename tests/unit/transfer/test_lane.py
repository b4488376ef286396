"""What crosses a link as one tensor."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distspec.transfer.lane import runs


@given(st.integers(1, 99), st.integers(1, 9))
def test_runs_cover_every_piece_once_in_order(count: int, size: int) -> None:
    given_pieces = [range(i * size, (i + 1) * size) for i in range(count)]
    found = list(runs(given_pieces))
    assert [position for run in found for position in run] == list(range(count * size))
    assert len(found[0]) == size
