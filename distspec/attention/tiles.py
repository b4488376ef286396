"""How the rows of a step are dealt to the programs of a paged attention kernel: tiles, splits and masks, as integers.

Knows spans, and how many programs keep a device busy. Does not know tensors, kernels or models.

A tile is a few rows of one span: they share a walk over its keys. A walk is cut into splits where tiles alone would
leave a device idle (FlashDecoding, Dao et al. 2023), in proportion to its length, so that one long context among short
ones does not make them wait. What a node sees of the scratch is a bit mask, so a whole tree needs no other call.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distspec.attention.base import Span

FIELDS = 10
"""Integers of an item, the work of one program: first row, rows (0: nothing to do), offset of the page table, length of
the span, keys from the first on that all rows see, first key, end of the keys, place of the tile's first split, own
split, splits."""

BITS = 32
"""Scratch indices in one word of a mask."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What a launch may use. rows: of a tile, at most. block: keys read at once; splits are whole blocks.
    programs: items, over which walks are split."""

    rows: int
    block: int
    programs: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows `row` .. `row` + `rows` - 1 of the step, of a span whose page table begins at `table`. least: keys that all
    of them see, from the first on; extent: end of the keys that any of them sees."""

    row: int
    rows: int
    table: int
    length: int
    least: int
    extent: int


def limits(span: Span) -> list[int]:
    """How many committed positions each row sees."""
    first = span.length - span.suffix + 1
    return [*range(first, first + span.suffix), *[span.length] * len(span.nodes)]


def words(spans: Iterable[Span]) -> int:
    """Words of a mask that holds what any node sees of the scratch; at least one."""
    return words_for(max((span.extent - span.length for span in spans), default=0))


def words_for(scratch: int) -> int:
    """Words of a mask of so many bits; at least one."""
    return max(1, -(-scratch // BITS))


def masks(span: Span, count: int) -> list[int]:
    """`count` words for each row: bit i of word w stands for the index `length` + BITS * w + i."""
    length, size = span.length, count * BITS // 8
    out = bytearray(span.suffix * size)
    for seen in span.nodes:
        bits = 0
        for index in seen:
            bits |= 1 << (index - length)
        out += bits.to_bytes(size, "little")
    return list(struct.unpack(f"<{span.rows * count}I", out))


def common(spans: Sequence[Span], rows: int, words: int, spare: int) -> list[int]:
    """What rows have of their own: locations to write to [rows], limits [rows], masks [rows, words]. Rows that pad
    write to the location `spare` and see nothing."""
    padding = rows - sum(span.rows for span in spans)
    out: list[int] = []
    for span in spans:
        out += span.write
    out += [spare] * padding
    for span in spans:
        out += limits(span)
    out += [0] * padding
    for span in spans:
        out += masks(span, words)
    out += [0] * (padding * words)
    return out


def tables(spans: Iterable[Span], page_size: int) -> tuple[list[int], list[int]]:
    """The pages that rows look at, span after span, and where those of each span begin."""
    out: list[int] = []
    starts = []
    for span in spans:
        starts.append(len(out))
        out += span.pages[: -(-span.extent // page_size)]
    return out, starts


def tiles(spans: Sequence[Span], starts: Sequence[int], most: int) -> list[list[Tile]]:
    """Of each span its rows in tiles of up to `most`; starts: of their page tables."""
    out, row = [], 0
    for span, table in zip(spans, starts, strict=True):
        seen = limits(span)
        own = []
        for start in range(0, span.rows, most):
            end = min(start + most, span.rows)
            extent = span.extent if end > span.suffix else seen[end - 1]
            own.append(Tile(row + start, end - start, table, span.length, seen[start], extent))
        out.append(own)
        row += span.rows
    return out


def items(work: Sequence[Tile], grid: Grid) -> list[int]:
    """The items of these tiles, FIELDS integers each, long walks first: at most len(work) + grid.programs of them, and
    at most grid.programs splits of tiles that are split."""
    total = sum(tile.extent for tile in work)
    out: list[int] = []
    place = 0
    for tile in sorted(work, key=lambda tile: -tile.extent):
        splits = max(1, tile.extent * grid.programs // max(1, total))
        chunk = -(-tile.extent // (splits * grid.block)) * grid.block
        splits = max(1, -(-tile.extent // max(1, chunk)))
        for split in range(splits):
            begin, end = split * chunk, min(tile.extent, (split + 1) * chunk)
            out += (tile.row, tile.rows, tile.table, tile.length, tile.least, begin, end, place, split, splits)
        place += splits if splits > 1 else 0
    return out


def groups(heads: int, most: int) -> int:
    """Into how many groups of equal size, of up to `most`, heads are dealt that share all they read."""
    return next(count for count in range(-(-heads // most), heads + 1) if heads % count == 0)
