"""The tree below one text that a drafter grows best first, known by costs alone.

The cost of a path is minus the log of its probability. A tree that always expands its likeliest leaves is every path
that costs no more than the last one, and is no deeper than it had time to grow: two numbers stand for all its nodes,
and the likeliest that nobody judges lie between two costs. How many that are, a list of all paths by cost says. Which
of them turn out right, a text says that is the same for every tree: it is the only path that has to be followed.

Knows text, nodes, and which of them were sent off. Does not know seconds, verifiers or policies.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache
from heapq import heappop, heappush
from random import Random

TOKENS = 2000
"""Length of the text."""

AHEAD = 512
"""Positions behind its end up to which something may be drafted."""

MOST_PATHS = 1500
"""Paths that are told apart: few trees expand more."""

DEEPEST = 63
"""Levels that are."""

TIE = 1e-4
"""What costs the same is spread over so much: a tree may end within it."""


class Paths:
    """Costs of the likeliest paths, the root's 0 first, where guesses of a rank are right as often on every level."""

    def __init__(self, odds: tuple[float, ...]) -> None:
        self.steps = tuple(_cost(share) for share in odds)
        found, open_ = list[tuple[float, int]](), [(0.0, 0)]
        while len(found) < MOST_PATHS:
            cost, level = heappop(open_)
            found.append((cost, level))
            for step in self.steps:
                heappush(open_, (cost + step, level + 1))
        self._paths = list(_spread(found))
        self._within: dict[int, list[float]] = {}

    def within(self, levels: int) -> list[float]:
        """Costs of paths of at most so many levels, in order."""
        levels = min(levels, DEEPEST)
        if levels not in self._within:
            self._within[levels] = [cost for cost, level in self._paths if level <= levels or levels == DEEPEST]
        return self._within[levels]

    def count(self, cost: float, levels: int) -> int:
        """Paths that cost no more and have no more levels, the root's among them."""
        return bisect_right(self.within(levels), cost) if cost >= 0 and levels >= 0 else 0

    def cost(self, count: int, levels: int) -> float:
        """Of the last of so many."""
        costs = self.within(levels)
        return costs[min(count, len(costs)) - 1]


class Text:
    """ranks[i]: of the guess that is right at position i, in a fixed order that has each as often as its odds say; as
    many as there are odds where none is. cost[i]: of all guesses up to there. tie[i]: between 0 and TIE."""

    def __init__(self, odds: tuple[float, ...]) -> None:
        self.ranks, self.cost = [0], [0.0]
        for point in _evenly(0):
            rank = 0
            while rank < len(odds) and point >= odds[rank]:
                point -= odds[rank]
                rank += 1
            self.ranks.append(rank)
            self.cost.append(self.cost[-1] + (_cost(odds[rank]) if rank < len(odds) else 0.0))
        self.tie = [TIE * point for point in _evenly(1)]


class Region:
    """Nodes that cost no more and lie no deeper than one of its pieces says: (cost, last position) along the text, the
    shallowest first, which cost most."""

    def __init__(self) -> None:
        self._pieces: list[tuple[float, int]] = []

    def add(self, cost: float, last: int) -> None:
        rest = [piece for piece in self._pieces if piece[0] > cost or piece[1] > last]
        if not any(piece[0] >= cost and piece[1] >= last for piece in rest):
            self._pieces = sorted([*rest, (cost, last)], key=lambda piece: piece[1])

    def has(self, cost: float, position: int) -> bool:
        return any(cost <= most and position <= last for most, last in self._pieces)

    def count(self, paths: Paths, base: float, root: int, limit: float = math.inf) -> int:
        """Of those at and below the root, which costs `base`, those that cost at most `limit` more."""
        count, above = 0, -1
        for cost, last in self._pieces:
            most, levels = min(limit, cost - base), last - root
            count += paths.count(most, levels) - paths.count(most, above)
            above = levels
        return count

    def move(self, base: float, root: int) -> None:
        """What does not lie below this root is gone."""
        self._pieces = [piece for piece in self._pieces if piece[0] >= base and piece[1] >= root]

    def depth(self, base: float, root: int, step: float) -> int:
        """Nodes on the path of those that cost `step` each, the root among them."""
        return max((min(last - root, int((cost - base) / step + 1e-9)) + 1 for cost, last in self._pieces), default=0)

    @property
    def most(self) -> float:
        """Cost of the least likely node."""
        return self._pieces[0][0] if self._pieces else -math.inf

    @property
    def last(self) -> int:
        """Position of the deepest."""
        return self._pieces[-1][1] if self._pieces else -1


class Canopy:
    """root: where the text stands. reach: how far along it the tree has grown. covered: how far along it nodes are
    judged or in flight; before the root where that is none. run: fresh roots so far. nodes: below the root.

    odds: as in Paths. fan: children of an expanded node. ranks: of guesses that are judged first. live: most nodes.
    """

    def __init__(self, odds: tuple[float, ...], fan: int, ranks: int, live: int) -> None:
        odds = (*odds[:fan], *[0.0] * (fan - len(odds)))
        self._text, self._paths, self._firsts = text(odds), paths(odds), paths(odds[:ranks])
        self._fan, self._ranks, self._live = fan, ranks, live
        self.root = self.reach = self.run = 0
        self.covered = -1
        self._expanded, self._sent, self._chain = Region(), Region(), 0.0
        self.nodes = 0

    @property
    def is_full(self) -> bool:
        return self.nodes >= self._live

    @property
    def is_judged(self) -> bool:
        """A verdict on the root is on its way."""
        return self.covered >= self.root

    @property
    def height(self) -> int:
        """Levels of the path of best guesses."""
        return self._expanded.depth(self._base, self.root, self._paths.steps[0])

    def widths(self, steps: int, width: int) -> Iterator[int]:
        """How many nodes each of the next drafter steps expands."""
        nodes = self.nodes
        for _ in range(steps):
            room, leaves = max(0, -(-(self._live - nodes) // self._fan)), nodes - nodes // self._fan + 1
            added = min(width, room, leaves)
            nodes += self._fan * added
            yield added

    def grow(self, steps: int, width: int) -> None:
        """Expand the `width` likeliest nodes without children, so many times."""
        for added in self.widths(steps, width):
            if added:
                self._expand(added)
        ranks, end = self._text.ranks, min(self._expanded.last, TOKENS + AHEAD - 1)
        while self.reach <= end and ranks[self.reach + 1] < self._fan:
            if self.reach > self.root and not self._expanded.has(self._place(self.reach), self.reach):
                break
            self.reach += 1

    def move(self, position: int) -> None:
        """The text is known up to here; what does not lie below is gone."""
        is_fresh = position > self.reach
        self.root, self._chain = position, 0.0
        if is_fresh:
            self.run += 1
            self.reach, self.covered = position, position - 1
            self._expanded, self._sent = Region(), Region()
        self._expanded.move(self._base, position)
        self._sent.move(self._base, position)
        self.nodes = self._fan * self._expanded.count(self._paths, self._base, position)

    def judge_best(self, most: int) -> tuple[int, int]:
        """Send off the root and the likeliest nodes of the first ranks: how many nodes that is, and the last position
        of the text whose outcome will be known."""
        count = min(most, self._ranks * self._expanded.count(self._firsts, self._base, self.root))
        self._chain = self._firsts.cost(count + 1, self._expanded.last + 1 - self.root) if count else 0.0
        limit, end = self._base + self._chain, self.root
        while end < self.reach and self._text.ranks[end + 1] < self._ranks and self._text.cost[end + 1] <= limit + TIE:
            end += 1
        self.covered = end
        return count, end

    def judge_next(self, most: int, enough: int) -> tuple[int, int] | None:
        """Send off the likeliest nodes that nobody judges, with all above them: as `judge_best`, or None where there
        are not enough."""
        count = min(most, self.nodes + 1 - self._taken(math.inf))
        if count < enough:
            return None
        levels, before = self._expanded.last + 1 - self.root, self._last_taken()
        limit = self._limit(count, levels, self._taken)
        first = end = max(self.covered + 1, self.root)
        while end <= self.reach and self._place(end) - self._base <= limit:
            end += 1
        known = end - 1 if end > first else self._above(first - 1, before, limit)
        above = (self._taken(limit) - 1) * min(1.0, max(0.0, limit - before) / self._paths.steps[0])
        self._sent.add(self._base + limit, self.root + levels)
        self.covered = max(self.covered, known)
        return count + round(above), known

    @property
    def _base(self) -> float:
        return self._text.cost[self.root]

    def _place(self, position: int) -> float:
        """Cost of the node there, with its place among those of the same cost."""
        return self._text.cost[position] + self._text.tie[position]

    def _expand(self, added: int) -> None:
        """One step; it can go a level deeper than those before."""
        levels, base = max(0, self._expanded.last + 1 - self.root), self._base
        self.nodes += self._fan * added
        limit = self._paths.cost(self.nodes // self._fan, levels)
        if base + limit < self._expanded.most:  # those before took less likely ones, since these were not there yet
            limit = self._limit(added, levels, lambda cost: self._expanded.count(self._paths, base, self.root, cost))
        self._expanded.add(base + limit, self.root + levels)

    def _taken(self, limit: float) -> int:
        """The root and nodes below it that are judged or in flight and cost no more than `limit`."""
        count = max(1, self._sent.count(self._paths, self._base, self.root, limit))
        if not self._chain:
            return count
        levels, sent = self._expanded.last + 1 - self.root, self._sent.most - self._base
        chain = self._firsts.count(min(limit, self._chain), levels)
        return count + max(0, chain - max(1, self._firsts.count(sent, levels)))

    def _last_taken(self) -> float:
        """Cost of the least likely node that is judged or in flight."""
        return max(self._chain, self._sent.most - self._base)

    def _limit(self, count: int, levels: int, taken: Callable[[float], int]) -> float:
        """What the last of the likeliest so many costs that are not taken."""
        costs = self._paths.within(levels)
        low, high = 0, len(costs) - 1
        while low < high:
            middle = (low + high) // 2
            if middle + 1 - taken(costs[middle]) >= count:
                high = middle
            else:
                low = middle + 1
        return costs[low]

    def _above(self, position: int, before: float, limit: float) -> int:
        """The last position up to here whose node has some below it that cost more than `before`, but not more than
        `limit`: those are judged with all that is above them."""
        while position > self.root:
            cost, levels = self._text.cost[position] - self._base, self._expanded.last + 1 - position
            if self._paths.count(limit - cost, levels) > self._paths.count(before - cost, levels):
                break
            position -= 1
        return position


def _cost(share: float) -> float:
    return -math.log(min(max(share, 1e-9), 1 - 1e-6))


def _spread(found: list[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """With what costs the same a little apart."""
    first = 0
    for i, (cost, _) in enumerate(found):
        if i + 1 < len(found) and found[i + 1][0] < cost + 1e-9:
            continue
        for k in range(first, i + 1):
            yield found[k][0] + (TIE * (k - first + 0.5) / (i + 1 - first) if k else 0.0), found[k][1]
        first = i + 1


@lru_cache(maxsize=16)
def paths(odds: tuple[float, ...]) -> Paths:
    return Paths(odds)


@lru_cache(maxsize=16)
def text(odds: tuple[float, ...]) -> Text:
    return Text(odds)


@lru_cache(maxsize=2)
def _evenly(order: int) -> tuple[float, ...]:
    """Points that are spread evenly from 0 to 1, in an order without pattern."""
    count = TOKENS + AHEAD
    points = [(i + 0.5) / count for i in range(count)]
    Random(order).shuffle(points)
    return tuple(points)
