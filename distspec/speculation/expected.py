"""The trees that drafters would grow, in expectation: nodes by how likely their path is, without tokens.

Knows odds by depth and rank. Does not know policies, seconds or any real tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache

Odds = tuple[tuple[float, ...], ...]
"""odds[depth][rank]: how often a guess of that rank is right given that its parent is; the last depth stands for all
below it, ranks beyond the last are never right."""

DEEPEST = 256
"""Levels after which a path is taken to have ended; and a path less likely than 1e-6 never begins."""


def odds_at(odds: Odds, depth: int) -> tuple[float, ...]:
    return odds[min(depth, len(odds) - 1)]


@lru_cache(maxsize=256)
def survival(odds: Odds) -> tuple[float, ...]:
    """[i]: how likely the first i best guesses are all right; [0] is 1."""
    out = [1.0]
    while len(out) <= DEEPEST and out[-1] > 1e-6:
        out.append(out[-1] * odds_at(odds, len(out) - 1)[0])
    return tuple(out)


def tau(odds: Odds, drafts: int) -> float:
    """Tokens that a round with a chain of so many drafts commits on average, the target's own included.

    (1 - a^(k+1)) / (1 - a) where every depth has the same odds (arXiv 2211.17192, eq. 1).
    """
    return sum(survival(odds)[: drafts + 1])


def best_tree(odds: Odds, nodes: int, depth: int, topk: int) -> list[float]:
    """Path probabilities, the likeliest first, of the `nodes` likeliest nodes of the first `topk` ranks down to
    `depth` levels: no tree of so many nodes commits more (1 + their sum) on average. Fewer if there are not so many.
    """
    return [*ranking(odds, topk, depth, nodes).value[1:]]


class Ranking:
    """The likeliest nodes below a root, in order; node 0 is the root. Parents come before their children.

    value[i]: probability of the path. parent[i], rank[i], depth[i]: as of a tree. child[i]: by rank, the node, or 0
    if it is not among the likeliest.
    """

    __slots__ = ("child", "depth", "parent", "rank", "value")

    def __init__(self, odds: Odds, ranks: int, depth: int, nodes: int) -> None:
        self.value, self.parent, self.rank, self.depth = [1.0], [-1], [0], [0]
        self.child: list[list[int]] = [[0] * ranks]
        heap: list[tuple[float, int, int]] = []
        self._offer(heap, odds, 0, depth)
        while heap and len(self.value) <= nodes:
            loss, parent, rank = heapq.heappop(heap)
            node = len(self.value)
            self.child[parent][rank] = node
            self.child.append([0] * ranks)
            self.value.append(-loss)
            self.parent.append(parent)
            self.rank.append(rank)
            self.depth.append(self.depth[parent] + 1)
            self._offer(heap, odds, node, depth)

    def __len__(self) -> int:
        return len(self.value)

    def below(self, nodes: Sequence[bool]) -> list[int]:
        """[i]: how many of the marked nodes are i or below it."""
        count = [int(marked) for marked in nodes]
        for node in range(len(count) - 1, 0, -1):
            count[self.parent[node]] += count[node]
        return count

    def _offer(self, heap: list[tuple[float, int, int]], odds: Odds, node: int, depth: int) -> None:
        if self.depth[node] < depth:
            shares = odds_at(odds, self.depth[node])[: len(self.child[node])]
            for rank, share in enumerate(shares):
                if share > 0:
                    heapq.heappush(heap, (-self.value[node] * share, node, rank))


@lru_cache(maxsize=256)
def ranking(odds: Odds, ranks: int, depth: int, nodes: int) -> Ranking:
    """A Ranking, kept for the next who asks; not to be changed."""
    return Ranking(odds, ranks, depth, nodes)


class Bush:
    """A tree as a drafter has it: those nodes of a Ranking whose parents were expanded.

    expanded: the first so many of the ranking. What a drafter keeps when the text follows its tree is again such a
    tree, of fewer expansions, where every depth has the same odds; else nearly so.
    """

    def __init__(self, order: Ranking, expanded: int) -> None:
        self._order = order
        self._open: list[int] = []
        self.expanded = [False] * len(order)
        self.nodes: list[int] = []
        self.height = 0
        heapq.heappush(self._open, 0)
        self.grow(expanded, 1, len(order))

    def grow(self, steps: int, width: int, live: int) -> None:
        """Expand the `width` likeliest nodes without children, `steps` times or until there are `live` nodes."""
        order, fan = self._order, len(self._order.child[0])
        for _ in range(steps):
            room = -(-(live - len(self.nodes)) // fan)
            for node in [heapq.heappop(self._open) for _ in range(min(width, room, len(self._open)))]:
                self.expanded[node] = True
                for child in filter(None, order.child[node]):
                    heapq.heappush(self._open, child)
                    self.nodes.append(child)
                    self.height = max(self.height, order.depth[child])

    def best(self, most: int, ranks: int, without: frozenset[int] = frozenset()) -> list[int]:
        """The likeliest nodes that are not among `without`, on paths of the first `ranks` guesses only."""
        within = {0}
        for node in sorted(self.nodes):
            if self._order.parent[node] in within and self._order.rank[node] < ranks:
                within.add(node)
        return [node for node in sorted(within) if node and node not in without][:most]
