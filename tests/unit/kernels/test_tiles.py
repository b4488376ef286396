"""How products are cut up: what must hold of every tile, measured or guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.kernels.tiles import _MEASURED, ROWS, Tile, tile

HOPPER = 227 * 1024
"""Bytes of shared memory that a program may have."""

SIZES = st.one_of(
    st.sampled_from(sorted(_MEASURED)), st.tuples(st.integers(1, 200_000), st.integers(1, 30_000), st.booleans())
)


def power_of_two(n: int) -> bool:
    return n & (n - 1) == 0 < n


@given(st.integers(1, 3 * ROWS[-1]), SIZES, st.sampled_from([64 * 1024, 99 * 1024, HOPPER]))
def test_a_tile_can_be_launched(rows: int, sizes: tuple[int, int, bool], room_bytes: int) -> None:
    found = tile(rows, *sizes, room_bytes)
    if found is None:
        assert rows > ROWS[-1] or (rows > 1 and (sizes[1] % 8 or room_bytes < HOPPER))
        return
    assert found.rows >= rows
    assert all(map(power_of_two, (found.rows, found.outputs, found.inputs, found.split, found.warps)))
    if found.rows == 1:
        assert found.split == found.apart == 1
    else:
        assert found.rows >= 16 <= found.inputs  # what matrix units take
        assert found.split == found.apart == 1 or not sizes[2]  # gated ones do not share
        weights = found.outputs * found.inputs * found.split * (2 if sizes[2] else 1)
        assert 2 * found.stages * (weights + found.rows * found.inputs * found.split) <= room_bytes


@pytest.mark.parametrize("sizes", sorted(_MEASURED))
def test_a_measured_tile_is_the_one_in_use(sizes: tuple[int, int, bool]) -> None:
    for below, rows, fields in zip((0, *ROWS), ROWS, _MEASURED[sizes], strict=False):
        assert {tile(count, *sizes, HOPPER) for count in (below + 1, rows)} == {Tile(*fields)}
