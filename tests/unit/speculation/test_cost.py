"""Expected tokens per second against plays of each idealised policy, one random guess at a time.

The plays share no line with the formulas: they keep times of verifiers, and trees as sets of paths of ranks.
"""

from __future__ import annotations

import math
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.curve import Curve
from distspec.speculation.cost import rate
from distspec.speculation.expected import Odds
from distspec.speculation.grid import candidates
from distspec.speculation.load import Load
from distspec.speculation.sizes import Sizes

TARGET_S, DRAFT_S, HOP_S = 0.020, 0.0014, 0.0003
Path = tuple[int, ...]


def load(draft_s: float = DRAFT_S, verifiers: int = 1, batch: int = 1, slope_s: float = 0.0) -> Load:
    """slope_s: of the target, per row."""
    target = Curve([(1, TARGET_S), (2, TARGET_S + slope_s)]) if slope_s else Curve([(1, TARGET_S)])
    return Load(target, Curve([(1, draft_s)]), HOP_S, batch, verifiers)


def odds(a: float) -> tuple[float, float, float]:
    """The second and third guess are right with half and a sixth of the remainder."""
    return a, (1 - a) / 2, (1 - a) / 6


def truth(rng: Random, shares: tuple[float, ...]) -> int:
    """The rank that is right; as many as there are ranks for none."""
    point = rng.random()
    for rank, share in enumerate(shares):
        point -= share
        if point < 0:
            return rank
    return len(shares)


def run_of_right(rng: Random, a: float) -> int:
    """Best guesses in a row that are right."""
    return int(math.log(1 - rng.random()) / math.log(a))


# -- chains ----------------------------------------------------------------------------------------


def play_sd(a: float, k: int, draft_s: float, runs: int = 40_000) -> float:
    rng = Random(1)
    tokens = sum(min(run_of_right(rng, a), k) + 1 for _ in range(runs))
    return tokens / (runs * (k * draft_s + HOP_S + TARGET_S + HOP_S))


def play_dsi(a: float, chunk: int, draft_s: float, verifiers: int, runs: int = 30_000) -> float:
    """A verifier once busy stays so for its forward, dead or not; a drafter is found in the middle of a step."""
    rng, free, now, tokens = Random(2), [0.0] * verifiers, 0.0, 0
    for _ in range(runs):
        right, began, judged, end = run_of_right(rng, a), now + rng.uniform(0, draft_s), 0, math.inf
        is_root = True
        while True:
            ready = now if is_root else began + (judged // chunk + 1) * (chunk * draft_s + HOP_S)
            at = min(range(verifiers), key=lambda v: free[v])
            start = max(ready, free[at])
            if start >= end:
                break
            free[at] = start + TARGET_S + HOP_S
            judged += 0 if is_root else chunk
            is_root = False
            if judged >= right and end == math.inf:
                end = free[at]
        tokens, now = tokens + right + 1, end
    return tokens / now


def play_pearl(a: float, steps: int, first: int, draft_s: float, runs: int = 30_000) -> float:
    rng, total, tokens = Random(3), 0.0, 0
    for _ in range(runs):
        right, call_s = run_of_right(rng, a), first * draft_s + HOP_S
        now = rng.uniform(0, draft_s)
        began, judged = now, first
        now += call_s + TARGET_S + HOP_S
        while judged < right:
            drafted = int((now - began) / call_s + 1e-9) * first
            judged = min(drafted, judged + 1 + steps)
            now += TARGET_S + HOP_S
        total, tokens = total + now, tokens + right + 1
    return tokens / total


@pytest.mark.parametrize("a", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("share", [0.03, 0.07, 0.3])
def test_sd(a: float, k: int, share: float) -> None:
    draft_s = share * TARGET_S
    sizes = Sizes(steps=k, nodes=k)
    assert rate("sd", sizes, load(draft_s), (odds(a),)) == pytest.approx(play_sd(a, k, draft_s), rel=0.02)


@pytest.mark.parametrize("a", [0.5, 0.7, 0.9])
@pytest.mark.parametrize(
    ("share", "chunk", "verifiers"),
    [
        *product((0.07, 0.15), (3, 5), (2,)),
        (0.07, 8, 2),
        *product((0.07, 0.15), (2, 4), (4,)),
        *product((0.07, 0.15), (4,), (8,)),
    ],
)
def test_dsi(a: float, share: float, chunk: int, verifiers: int) -> None:
    draft_s = share * TARGET_S
    sizes = Sizes(steps=chunk, nodes=chunk, lookahead=chunk)
    seen = play_dsi(a, chunk, draft_s, verifiers)
    assert rate("dsi", sizes, load(draft_s, verifiers), (odds(a),)) == pytest.approx(seen, rel=0.03)


@pytest.mark.parametrize("a", [0.5, 0.7, 0.9])
@pytest.mark.parametrize(("steps", "first"), [(4, 1), (8, 1), (8, 2), (16, 2)])
@pytest.mark.parametrize("share", [0.05, 0.07])
def test_pearl(a: float, steps: int, first: int, share: float) -> None:
    draft_s = share * TARGET_S
    sizes = Sizes(steps=steps, nodes=steps, lookahead=first)
    seen = play_pearl(a, steps, first, draft_s)
    assert rate("pearl", sizes, load(draft_s), (odds(a),)) == pytest.approx(seen, rel=0.03)


# -- trees -----------------------------------------------------------------------------------------


class Grove:
    """A tree by paths: those that were expanded, and all that there are."""

    def __init__(self, shares: tuple[float, ...], fan: int) -> None:
        self.shares, self.fan = shares, fan
        self.expanded: set[Path] = set()
        self.nodes: set[Path] = set()

    def worth(self, path: Path) -> float:
        return math.prod(self.shares[rank] for rank in path)

    def height(self) -> int:
        return max((len(path) for path in self.nodes), default=0)

    def grow(self, steps: int, width: int, live: int) -> None:
        for _ in range(steps):
            room = max(0, math.ceil((live - len(self.nodes)) / self.fan))
            open_ = sorted({(), *self.nodes} - self.expanded, key=lambda path: (-self.worth(path), path))
            for path in open_[: min(width, room)]:
                self.expanded.add(path)
                self.nodes |= {(*path, rank) for rank in range(self.fan)}

    def best(self, most: int, topk: int) -> set[Path]:
        within = [path for path in self.nodes if max(path) < topk]
        return set(sorted(within, key=lambda path: (-self.worth(path), path))[:most])

    def follow(self, path: Path) -> None:
        """Make this path the root; one that is not there leaves nothing."""
        self.expanded = {p[len(path) :] for p in self.expanded if p[: len(path)] == path}
        self.nodes = {p[len(path) :] for p in self.nodes if p[: len(path)] == path and p != path}


def walk(rng: Random, grove: Grove, judged: set[Path]) -> Path:
    """Where it ends: the first node that is right and was not judged."""
    path: Path = (truth(rng, grove.shares),)
    while path in judged:
        path = (*path, truth(rng, grove.shares))
    return path


def play_ssd(shares: tuple[float, ...], sizes: Sizes, runs: int) -> float:
    rng, grove, now, tokens = Random(4), Grove(shares, sizes.branch_topk), 0.0, 0
    for _ in range(runs):
        lacking = sizes.steps - grove.height()
        if lacking > 0:  # the drafter is waited for once, however deep it came
            now += lacking * DRAFT_S + HOP_S
            grove.grow(lacking, sizes.topk, sizes.max_live_nodes)
        judged = grove.best(sizes.nodes, sizes.topk)
        calls = int((TARGET_S + HOP_S) / (sizes.lookahead * DRAFT_S + HOP_S))
        grove.grow(calls * sizes.lookahead, sizes.branch_width, sizes.max_live_nodes)
        end = walk(rng, grove, judged)
        grove.follow(end)
        now, tokens = now + TARGET_S + HOP_S, tokens + len(end)
    return tokens / now


@pytest.mark.parametrize(
    ("a", "steps", "topk", "nodes"),
    [(0.5, 2, 1, 4), (0.5, 5, 1, 5), (0.5, 3, 3, 16), (0.8, 2, 1, 4), (0.8, 5, 1, 5), (0.8, 3, 3, 16)],
)
def test_ssd(a: float, steps: int, topk: int, nodes: int) -> None:
    sizes = Sizes(steps=steps, topk=topk, nodes=nodes)
    seen = play_ssd(odds(a), sizes, 4000)
    assert rate("ssd", sizes, load(), (odds(a),)) == pytest.approx(seen, rel=0.03)


@pytest.mark.parametrize("a", [0.5, 0.8])
@pytest.mark.parametrize(("steps", "topk", "nodes"), [(4, 2, 8), (6, 3, 24)])
def test_sd_of_trees(a: float, steps: int, topk: int, nodes: int) -> None:
    rng, grove = Random(5), Grove(odds(a), topk)
    grove.grow(steps, topk, 64)
    judged = grove.best(nodes, topk)
    tokens = sum(len(walk(rng, grove, judged)) for _ in range(20_000)) / 20_000
    seen = tokens / (steps * DRAFT_S + TARGET_S + 2 * HOP_S)
    sizes = Sizes(steps=steps, topk=topk, nodes=nodes)
    assert rate("sd", sizes, load(), (odds(a),)) == pytest.approx(seen, rel=0.02)


def test_bvsp_with_one_verifier_is_ssd_and_a_second_one_is_worth_it() -> None:
    sizes, table = Sizes(steps=3, nodes=6, max_live_nodes=96), (odds(0.8),)
    alone = rate("bvsp", sizes, load(), table)
    assert alone == rate("ssd", sizes, load(), table)
    assert rate("bvsp", sizes, load(verifiers=2), table) > 1.2 * alone


# -- what a fleet makes of it ----------------------------------------------------------------------

MOST = Sizes(steps=8, topk=1, nodes=16, lookahead=8, max_live_nodes=48)
POLICIES = ("sd", "pearl", "dsi", "ssd", "bvsp")


@given(st.floats(0.05, 0.95), st.sampled_from([1, 4, 16, 64]), st.integers(1, 8))
def test_depths_that_differ_lie_between_those_that_do_not(a: float, batch: int, k: int) -> None:
    worse, better = odds(a * 0.9), odds(a)
    fleet, sizes = load(batch=batch, slope_s=1e-4), Sizes(steps=k, nodes=k)
    low, middle, high = (rate("sd", sizes, fleet, table) for table in ((worse,), (better, worse), (better,)))
    assert low < middle <= high * (1 + 1e-9)


def test_plain_decoding_wins_where_guesses_are_wrong_or_rows_are_dear() -> None:
    def gain(fleet: Load, table: Odds) -> float:
        best = max(rate(policy, sizes, fleet, table) for policy, sizes in candidates(POLICIES, MOST))
        return best / rate("ar", MOST, fleet, table)

    assert gain(load(verifiers=2), ((0.01, 0.0),)) < 1 + 1e-9
    assert gain(load(batch=64, slope_s=TARGET_S), (odds(0.6),)) < 1 + 1e-9
    assert gain(load(), (odds(0.8),)) > 1.5


def test_replicas_share_the_requests_of_plain_decoding() -> None:
    fleet = load(batch=8, verifiers=2, slope_s=1e-3)
    assert rate("ar", MOST, fleet, ((0.5,),)) == pytest.approx(8 / (TARGET_S + 3e-3))
