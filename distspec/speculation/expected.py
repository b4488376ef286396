"""The tree that a drafter would grow from nothing, in expectation: nodes by how likely their path is, without tokens.

Knows odds by depth and rank. Does not know policies, seconds or any real tree.
"""

from __future__ import annotations

import heapq
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
    bush = Bush(odds, topk, nodes, depth)
    return [bush.value[node] for node in bush.best(nodes, topk)]


class Bush:
    """A tree as a drafter grows it: node 0 is the root, and every expanded node has `fan` children.

    value[i]: probability of the path. parent[i], rank[i], depth[i]: as of a tree; parents come before children.
    children[i]: empty until the node is expanded.

    Begins with so many expansions, of the likeliest nodes above `levels`.
    """

    __slots__ = ("_fan", "_odds", "_open", "children", "depth", "parent", "rank", "value")

    def __init__(self, odds: Odds, fan: int, expanded: int = 0, levels: int = DEEPEST) -> None:
        self._odds, self._fan = odds, fan
        self.value, self.parent, self.rank, self.depth = [1.0], [-1], [0], [0]
        self.children: list[list[int]] = [[]]
        self._open = [(-1.0, 0)]
        too_deep = []
        while expanded and self._open:
            entry = heapq.heappop(self._open)
            if self.depth[entry[1]] < levels:
                self._expand(entry[1])
                expanded -= 1
            else:
                too_deep.append(entry)
        for entry in too_deep:
            heapq.heappush(self._open, entry)

    def __len__(self) -> int:
        """Nodes below the root."""
        return len(self.value) - 1

    def grow(self, steps: int, width: int, live: int) -> None:
        """Expand the `width` likeliest nodes without children, `steps` times or until there are `live` nodes."""
        for _ in range(steps):
            room = max(0, -(-(live - len(self)) // self._fan))
            for _, node in [heapq.heappop(self._open) for _ in range(min(width, room, len(self._open)))]:
                self._expand(node)

    def best(self, most: int, ranks: int) -> list[int]:
        """The likeliest nodes on paths of the first `ranks` guesses only."""
        within = {0}
        for node in range(1, len(self.value)):
            if self.rank[node] < ranks and self.parent[node] in within:
                within.add(node)
        value = self.value
        return sorted((n for n in within if n), key=lambda n: (-value[n], n))[:most]

    def _expand(self, node: int) -> None:
        depth = self.depth[node] + 1
        for rank, share in enumerate(odds_at(self._odds, depth - 1)[: self._fan]):
            child = len(self.value)
            self.value.append(self.value[node] * share)
            self.parent.append(node)
            self.rank.append(rank)
            self.depth.append(depth)
            self.children.append([])
            self.children[node].append(child)
            heapq.heappush(self._open, (-self.value[child], child))
