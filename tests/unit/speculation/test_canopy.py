"""Trees that are known by costs against trees of nodes, grown and followed along the same text."""

from __future__ import annotations

import itertools
import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.speculation.canopy import TIE, TOKENS, Canopy, Paths, text

ODDS = (0.7, 0.15, 0.05)
Path = tuple[int, ...]

shares = st.lists(st.floats(0.05, 0.9), min_size=1, max_size=3).map(
    lambda odds: tuple(share / max(1.0, sum(odds) + 0.01) for share in odds)
)


class Tree:
    """A drafter's: expanded nodes by their ranks from the root. What is as likely is taken by chance."""

    def __init__(self, odds: tuple[float, ...], live: int) -> None:
        self.odds, self.live, self.rng = odds, live, Random(1)
        self.expanded: dict[Path, float] = {}

    def cost(self, path: Path) -> float:
        return -sum(math.log(self.odds[rank]) for rank in path)

    def leaves(self) -> list[Path]:
        return [leaf for leaf in self.all() if leaf not in self.expanded]

    def all(self) -> list[Path]:
        return [(), *((*path, rank) for path in self.expanded for rank in range(len(self.odds)))]

    def grow(self, steps: int, width: int) -> None:
        for _ in range(steps):
            room = max(0, math.ceil((self.live - len(self.odds) * len(self.expanded)) / len(self.odds)))
            ranked = sorted((self.cost(leaf) + self.rng.uniform(0, 1e-9), leaf) for leaf in self.leaves())
            self.expanded |= {leaf: cost for cost, leaf in ranked[: min(width, room)]}

    def follow(self, path: Path) -> None:
        self.expanded = {p[len(path) :]: cost for p, cost in self.expanded.items() if p[: len(path)] == path}


@given(shares, st.floats(0, 4), st.integers(0, 4))
def test_paths_are_counted(odds: tuple[float, ...], cost: float, levels: int) -> None:
    every = [p for d in range(levels + 1) for p in itertools.product(range(len(odds)), repeat=d)]
    costs = sorted(-sum(math.log(odds[rank]) for rank in path) for path in every)
    paths = Paths(odds)
    least, most = (sum(1 for one in costs if one <= cost + by) for by in (-2 * TIE, 2 * TIE))
    assert least <= paths.count(cost, levels) <= most
    assert paths.cost(max(1, least), levels) <= cost + 4 * TIE


@pytest.mark.parametrize("odds", [(0.9, 0.05), ODDS, (0.5, 0.25, 0.08)])
def test_each_rank_is_right_as_often_as_it_should_be(odds: tuple[float, ...]) -> None:
    ranks = text(odds).ranks[1:]
    for rank, share in enumerate((*odds, 1 - sum(odds))):
        assert ranks.count(rank) / len(ranks) == pytest.approx(share, abs=1e-3)


@given(shares, st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), max_size=4), st.integers(3, 80))
def test_it_has_as_many_nodes_as_a_drafter_would_grow(
    odds: tuple[float, ...], growths: list[tuple[int, int]], live: int
) -> None:
    tree, canopy = Tree(odds, live), Canopy(odds, len(odds), 1, live)
    for steps, width in growths:
        assert sum(canopy.widths(steps, width)) * len(odds) + canopy.nodes < live + len(odds)
        tree.grow(steps, width)
        canopy.grow(steps, width)
        assert canopy.nodes == len(odds) * len(tree.expanded)


@pytest.mark.parametrize("odds", [(0.9, 0.05, 0.02), ODDS, (0.5, 0.25, 0.08)])
@pytest.mark.parametrize(("steps", "width", "live"), [(2, 8, 64), (2, 4, 120), (4, 8, 120)])
def test_it_foresees_as_much_of_a_text_as_a_tree_does(
    odds: tuple[float, ...], steps: int, width: int, live: int
) -> None:
    """Rounds that each judge the best guess and go on behind it. A tree that is full lacks some likely nodes: it took
    others before these were there."""
    tree, canopy, ranks = Tree(odds, live), Canopy(odds, 3, 1, live), text(odds).ranks
    foreseen, nodes = [0, 0], [0, 0]
    while canopy.root < TOKENS:
        root = canopy.root
        tree.grow(steps, width)
        canopy.grow(steps, width)
        known = set(tree.all())
        depth = 0
        while tuple(ranks[root + 1 : root + depth + 2]) in known:
            depth += 1
        foreseen = [foreseen[0] + canopy.reach - root, foreseen[1] + depth]
        nodes = [nodes[0] + canopy.nodes, nodes[1] + len(known) - 1]
        following = root + 1 + (ranks[root + 1] == 0)
        tree.follow(tuple(ranks[root + 1 : following + 1]))
        canopy.move(following)
    assert foreseen[0] == pytest.approx(foreseen[1], rel=0.07)
    assert nodes[0] == pytest.approx(nodes[1], rel=0.04)


@given(shares, st.integers(1, 3), st.integers(1, 30), st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_what_is_sent_off_was_not_sent_before_and_is_all_there_is(
    odds: tuple[float, ...], ranks: int, live: int, sizes: list[int]
) -> None:
    """Without the nodes above them, which each verifier needs."""
    canopy = Canopy(odds, len(odds), ranks, live)
    canopy.grow(4, 4)
    first, known = canopy.judge_best(sizes[0])
    assert first <= sizes[0]
    assert canopy.root <= known == canopy.covered <= canopy.reach
    left = canopy.nodes - first
    while (sent := canopy.judge_next(sizes[-1], 1)) is not None:
        assert canopy.covered >= sent[1] >= canopy.root
        assert sent[0] >= min(sizes[-1], left) > 0
        left -= sizes[-1]
    assert left <= 2 * len(odds)  # ties count with one of two sets
    assert canopy.judge_next(1, 2) is None


def test_a_text_that_was_not_foreseen_is_a_fresh_root() -> None:
    canopy = Canopy(ODDS, 3, 1, 64)
    canopy.grow(2, 4)
    canopy.judge_best(2)
    assert canopy.is_judged
    assert canopy.nodes
    canopy.move(canopy.reach + 1)
    assert (canopy.run, canopy.nodes, canopy.height, canopy.is_judged) == (1, 0, 0, False)
    assert canopy.reach == canopy.root
