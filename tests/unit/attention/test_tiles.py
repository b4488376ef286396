"""How rows are dealt to programs: every key of every row is walked once, by no more programs than there may be."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from distspec.attention.tiles import BITS, FIELDS, Grid, Tile, items, limits, masks, tables, tiles, words
from tests.unit.attention.test_sdpa import random_span, visible

SIZES = st.lists(st.sampled_from([1, 1, 2, 6, 16, 40, 90]), min_size=1, max_size=6)


@given(st.integers(0, 2**32), SIZES, st.sampled_from([1, 3, 8]), st.sampled_from([1, 16, 64]), st.integers(1, 40))
def test_items_cover_each_row_and_each_key_once(
    seed: int, sizes: list[int], most: int, block: int, programs: int
) -> None:
    draw, pages = random.Random(seed), list(range(2000))
    spans = [random_span(draw, pages, 16, rows) for rows in sizes]
    table, starts = tables(spans, 16)
    work = [tile for own in tiles(spans, starts, most) for tile in own]
    flat = items(work, Grid(most, block, programs))
    found = [flat[i : i + FIELDS] for i in range(0, len(flat), FIELDS)]
    assert len(found) <= len(work) + programs

    rows_of = [(span, row) for span in spans for row in range(span.rows)]
    walked: dict[int, list[tuple[int, int]]] = {}
    places: list[int] = []
    for row, rows, at, length, least, begin, end, place, split, splits in found:
        assert begin % block == 0
        assert 0 < rows <= most
        places += [place + split] if splits > 1 else []
        for one in range(row, row + rows):
            span, own = rows_of[one]
            assert (length, table[at]) == (span.length, span.pages[0])
            assert least <= limits(span)[own]
            walked.setdefault(one, []).append((begin, end))
    assert sorted(places) == list(range(len(places)))
    assert len(places) <= programs
    assert sorted(walked) == list(range(len(rows_of)))
    for one, (span, row) in enumerate(rows_of):
        parts = sorted(walked[one])
        assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
        assert parts[-1][1] > max(visible(span, row))


@given(st.integers(0, 2**32), st.sampled_from([1, 6, 70]))
def test_limits_and_masks_are_what_a_row_sees(seed: int, rows: int) -> None:
    span = random_span(random.Random(seed), list(range(2000)), 1, rows)
    count = words([span])
    bits = masks(span, count)
    for row, limit in enumerate(limits(span)):
        own = bits[row * count : (row + 1) * count]
        marked = [span.length + w * BITS + bit for w, word in enumerate(own) for bit in range(BITS) if word >> bit & 1]
        assert [*range(limit), *marked] == sorted(visible(span, row))


def test_a_long_walk_among_short_ones_gets_the_splits() -> None:
    work = [Tile(0, 1, 0, 6400, 6400, 6400), *[Tile(i, 1, 0, 64, 64, 64) for i in range(1, 5)]]
    flat = items(work, Grid(1, 64, 20))
    splits = [flat[i + 9] for i in range(0, len(flat), FIELDS)]
    assert splits == [17] * 17 + [1] * 4  # 19 by its share, 17 in whole blocks
