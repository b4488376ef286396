"""The pieces of a ticket."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distspec.transfer.base import pieces


@given(st.integers(0, 99), st.integers(1, 5000), st.integers(0, 1 << 24))
def test_pieces_cover_every_position_once_in_order(start: int, length: int, position_bytes: int) -> None:
    found = pieces(start, length, position_bytes)
    assert [position for piece in found for position in piece] == list(range(start, start + length))
    assert all(len(piece) * position_bytes <= 32 << 20 for piece in found if len(piece) > 1)
