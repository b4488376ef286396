"""Few rows in which the values of several dimensions meet, instead of all rows of their product."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations, product
from random import Random
from typing import Any

TRIALS = 20
"""Rows that are thought of for each one that is taken."""

Meeting = tuple[tuple[int, int], ...]
"""(dimension, index of a value in it), of each that meets."""


def covering(
    *dimensions: Sequence[Any], groups: Collection[Sequence[int]] = (), seed: int = 0
) -> list[tuple[Any, ...]]:
    """Rows, one value of each dimension, in which any two values of any two dimensions meet somewhere.

    groups: dimensions, by index, of which all combinations of values meet, not only pairs. The same seed gives the
    same rows. Greedy, as AETG (Cohen, Dalal, Fredman and Patton 1997): each row begins with a combination that has
    not met yet, and the other dimensions take, in random order, what lets most others meet.
    """
    random, sizes = Random(seed), [range(len(values)) for values in dimensions]
    wanted = {*combinations(range(len(dimensions)), 2), *(tuple(sorted(group)) for group in groups)}
    left: set[Meeting] = {
        tuple(zip(group, values, strict=True)) for group in wanted for values in product(*(sizes[i] for i in group))
    }
    rows = []
    while left:
        trials = [_row(sizes, left, random) for _ in range(TRIALS)]
        row = max(trials, key=lambda row: len(_met(row, left)))
        left -= _met(row, left)
        rows.append(tuple(values[row[i]] for i, values in enumerate(dimensions)))
    return rows


def _row(sizes: Sequence[range], left: set[Meeting], random: Random) -> dict[int, int]:
    row = dict(random.choice(sorted(left)))
    free = [i for i in range(len(sizes)) if i not in row]
    for i in random.sample(free, len(free)):
        values = random.sample(sizes[i], len(sizes[i]))
        row[i] = max(values, key=lambda value: len(_met({**row, i: value}, left)))
    return row


def _met(row: dict[int, int], left: set[Meeting]) -> set[Meeting]:
    return {meeting for meeting in left if all(row.get(i) == value for i, value in meeting)}
