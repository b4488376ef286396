"""Expected trees against a count of every possibility."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.speculation.expected import Bush, Odds, best_tree, odds_at, tau

levels = st.lists(st.floats(0, 1), min_size=1, max_size=3).map(
    lambda shares: tuple(share / max(1.0, sum(shares)) for share in shares)
)
tables = st.lists(levels, min_size=1, max_size=3).map(tuple)


def chance(odds: Odds, path: tuple[int, ...]) -> float:
    shares = [odds_at(odds, depth) for depth in range(len(path))]
    return math.prod(at[rank] if rank < len(at) else 0.0 for at, rank in zip(shares, path, strict=True))


def paths(bush: Bush) -> list[tuple[int, ...]]:
    """Of every node, by ranks from the root."""
    out: list[tuple[int, ...]] = [()]
    for node in range(1, len(bush) + 1):
        out.append((*out[bush.parent[node]], bush.rank[node]))
    return out


@given(st.floats(0, 0.99), st.integers(0, 20))
def test_tau_of_even_odds_is_the_geometric_sum(a: float, k: int) -> None:
    assert tau(((a,),), k) == pytest.approx((1 - a ** (k + 1)) / (1 - a), rel=1e-4)


@given(tables, st.integers(0, 6))
def test_tau_is_the_sum_over_how_many_are_right(odds: Odds, k: int) -> None:
    total = 0.0
    for right in range(k + 1):
        stop = 1 - odds_at(odds, right)[0] if right < k else 1.0
        total += chance(odds, (0,) * right) * stop * (right + 1)
    assert tau(odds, k) == pytest.approx(total, rel=1e-4)


@given(tables, st.integers(1, 12), st.integers(1, 3), st.integers(1, 3))
def test_best_tree_is_the_likeliest_of_all_nodes(odds: Odds, nodes: int, depth: int, topk: int) -> None:
    every = [p for d in range(1, depth + 1) for p in itertools.product(range(topk), repeat=d)]
    chances = sorted((chance(odds, path) for path in every), reverse=True)[:nodes]
    best = [value for value in best_tree(odds, nodes, depth, topk) if value > 0]
    assert best == pytest.approx([value for value in chances if value > 0])


@given(tables, st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 30))
def test_a_bush_grows_as_a_drafter_does(odds: Odds, fan: int, steps: int, width: int, live: int) -> None:
    bush = Bush(odds, fan)
    bush.grow(steps, width, live)
    tree, open_ = {()}, [()]
    for _ in range(steps):
        open_.sort(key=lambda path: -chance(odds, path))
        room = -(-(live - len(tree) + 1) // fan)
        now, open_ = open_[: max(0, min(width, room))], open_[max(0, min(width, room)) :]
        for path in now:
            children = [(*path, rank) for rank in range(min(fan, len(odds_at(odds, len(path)))))]
            tree |= set(children)
            open_ += children
    assert sum(chance(odds, path) for path in tree) == pytest.approx(1 + sum(bush.value[1:]), abs=1e-9)
    assert len(bush) == len(tree) - 1
    assert len(bush) < live + fan


@given(tables, st.integers(1, 3), st.integers(0, 8), st.integers(1, 12), st.integers(1, 3))
def test_the_best_nodes_hang_together(odds: Odds, fan: int, expanded: int, most: int, ranks: int) -> None:
    bush = Bush(odds, fan, expanded)
    names = paths(bush)
    inside = {(), *(names[node] for node in bush.best(most, ranks))}
    assert len(inside) <= most + 1
    assert all(name[:-1] in inside and max(name) < ranks for name in inside if name)


def test_levels_bound_what_a_bush_begins_with() -> None:
    bush = Bush(((0.9, 0.05),), 2, 3, 2)
    assert max(bush.depth) == 2
    assert sum(1 for children in bush.children if children) == 3
    assert max(Bush(((0.9, 0.05),), 2, 3).depth) == 3
