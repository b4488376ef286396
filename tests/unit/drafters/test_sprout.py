"""The tree below a text against the same by the book, whatever was grown, followed and left before."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.drafters.base import Proposal
from distspec.drafters.sprout import Sprout, worth
from distspec.protocol.values import ROOT, Shape
from tests.growth import Growth, Path, paths

VOCAB = 6
STOP = 5

shapes = st.builds(
    Shape,
    steps=st.just(1),
    topk=st.integers(1, 4),
    width=st.integers(1, 4),
    nodes=st.integers(1, 24),
    depth=st.integers(0, 6),
    odds=st.sampled_from([(), (0.8, 0.1, 0.03), (0.5,)]),
)
follows = st.tuples(st.integers(0, 30), st.lists(st.integers(0, VOCAB - 1), max_size=2))
turns = st.lists(st.tuples(shapes, st.integers(0, 4), follows), min_size=1, max_size=8)


def guess(text: Path) -> list[tuple[int, float]]:
    """Something that depends on the whole text, with scores that are all different."""
    dice = random.Random(repr(text))
    tokens = dice.sample(range(VOCAB), VOCAB)
    return list(zip(tokens, sorted((-3 * dice.random() for _ in tokens), reverse=True), strict=True))


def route(tree: Sprout, id: int) -> Path:
    return tuple(tree.token(above) for above in tree.path(id))


@given(turns)
def test_equals_growth_by_the_book(turns: list[tuple[Shape, int, tuple[int, list[int]]]]) -> None:
    tree, born = Sprout(), -1
    text: Path = ()

    def after(path: Path) -> list[tuple[int, float]]:
        return guess(text + path)

    book = Growth(after, stop=(STOP,))
    for shape, steps, (pick, more) in turns:
        for _ in range(steps):
            frontier = tree.frontier(shape)
            grown = []
            for id in frontier:
                grown.append(route(tree, id))
                children = tree.expand(id, after(grown[-1]), shape, stop=(STOP,))
                assert list(tree.children(id)) == children
                assert all(tree.parent(child) == id for child in children)
                assert all(child > born for child in children)
                born = max(children, default=born)
            assert grown == book.grow(shape)
        assert tree.proposal() == book.proposal()
        assert [route(tree, id) for id in tree] == paths(tree.proposal())
        known = ((), *book.found)
        came = (*known[pick % len(known)], *more)
        _follow(tree, came)
        book.follow(came)
        text += came
        assert tree.proposal() == book.proposal()


@pytest.mark.parametrize("odds", [(), (0.6, 0.25, 0.1), (0.5, 0.25)])
@pytest.mark.parametrize("seed", range(8))
def test_a_tree_that_the_text_follows_for_long_grows_by_the_book(seed: int, odds: tuple[float, ...]) -> None:
    """Nodes are ranked once, and then only compared; with odds many are of equal worth."""
    dice, tree, grown = random.Random(seed), Sprout(), 0
    text: Path = ()
    book = Growth(lambda path: guess(text + path), stop=(STOP,))
    for _ in range(60):
        shape = Shape(steps=1, topk=3, width=dice.randint(1, 6), nodes=dice.choice((6, 30)), depth=4, odds=odds)
        for _ in range(dice.randrange(3)):
            frontier = tree.frontier(shape)
            routes = [route(tree, id) for id in frontier]
            for id, path in zip(frontier, routes, strict=True):
                tree.expand(id, guess(text + path), shape, stop=(STOP,))
            assert routes == book.grow(shape)
            grown += len(routes)
        ways = [path for path in book.found if len(path) < 4]
        came = dice.choice(ways) if ways else ()
        tree.advance(came)
        book.follow(came)
        text += came
    assert grown > 60


def _follow(tree: Sprout, came: Path) -> None:
    """Advance, and see that every node is one of: on the way, gone, or still there with the path that is left of it."""
    before = {id: route(tree, id) for id in tree}
    kept, gone = tree.advance(came)
    assert [before[id] for id in kept] == [came[: i + 1] for i in range(len(kept))]
    assert came[: len(kept) + 1] not in before.values() or len(kept) == len(came)
    left = {id: path[len(came) :] for id, path in before.items() if path[: len(came)] == came and path != came}
    assert {id: route(tree, id) for id in tree} == left
    assert set(gone) == before.keys() - left.keys() - set(kept)
    assert len(set(gone)) == len(gone)


@given(turns)
def test_nothing_grows_past_the_shape_or_below_a_stop_token(
    turns: list[tuple[Shape, int, tuple[int, list[int]]]],
) -> None:
    for shape, steps, _ in turns:
        tree = Sprout()
        for _ in range(steps):
            frontier = tree.frontier(shape)
            assert len(frontier) <= shape.width
            for id in frontier:
                assert 1 <= len(tree.expand(id, guess(route(tree, id)), shape, stop=(STOP,))) <= shape.topk
        found = paths(tree.proposal())
        assert len(tree) == len(found) <= shape.nodes
        assert len(set(found)) == len(found)
        assert all(len(path) <= shape.depth for path in found)
        assert all(STOP not in path[:-1] for path in found)


def test_a_static_tree_ranks_by_place_and_a_dynamic_one_by_confidence() -> None:
    unsure, sure = (1, -5.0), (2, -6.0)
    static, dynamic = Shape(steps=1, topk=2, odds=(0.6, 0.3)), Shape(steps=1, topk=2)
    for shape, best in ((static, [0, 2]), (dynamic, [0, 1])):
        tree = Sprout()
        tree.expand(ROOT, [unsure, sure], shape)
        assert tree.frontier(shape) == [0]
        tree.expand(0, [(3, -9.0), (4, -9.5)], shape)
        # 0.6 * 0.6 of rank 0 below rank 0 is more than 0.3; a score of -14 is less than one of -6
        assert tree.frontier(shape) == [best[1]]


def test_a_text_that_ends_in_a_stop_token_is_a_text_like_any_other() -> None:
    shape = Shape(steps=1)
    tree = Sprout()
    [stop] = tree.expand(ROOT, [(STOP, -1.0)], shape, stop=(STOP,))
    assert tree.frontier(shape) == []
    assert tree.advance([STOP]) == ([stop], [])
    assert tree.frontier(shape) == Sprout().frontier(shape) == [ROOT]


def test_clearing_names_every_node() -> None:
    shape = Shape(steps=1, topk=2)
    tree = Sprout()
    tree.expand(ROOT, [(1, -1.0), (2, -2.0)], shape)
    tree.expand(0, [(3, -1.0)], shape)
    assert tree.clear() == [0, 1, 2]
    assert (len(tree), tree.proposal()) == (0, Proposal((), ()))
    assert tree.frontier(shape) == [ROOT]
    assert tree.expand(ROOT, [(1, -1.0)], shape) == [3]


@pytest.mark.parametrize("odds", [(0.8, 0.1, 0.03), (0.5,), (1.0, 0.0)])
def test_odds_fall_with_rank_even_beyond_those_given(odds: tuple[float, ...]) -> None:
    shares = [math.exp(worth(rank, None, odds)) for rank in range(8)]
    assert shares[: len(odds)] == pytest.approx([max(share, 1e-9) for share in odds])
    assert all(above >= below > 0 for above, below in pairwise(shares))


def test_without_odds_a_score_counts_and_without_a_score_the_rank() -> None:
    assert worth(3, -0.25, ()) == -0.25
    assert worth(0, 0.5, ()) == 0  # no guess is surer than sure
    assert [worth(rank, None, ()) for rank in range(3)] == pytest.approx([math.log(0.5**n) for n in (1, 2, 3)])
