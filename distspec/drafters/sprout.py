"""The tree that a drafter keeps below the end of one text: how it grows, and what of it outlives a commit.

Knows tokens, ranks, scores and the shape that is asked for. Does not know where guesses come from, KV or requests.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import islice

from torch import Tensor

from distspec.drafters.base import Proposal
from distspec.protocol.odds import share
from distspec.protocol.values import ROOT, Shape


@dataclass(slots=True)
class _Node:
    """rank: among its siblings, 0 the best guess. score: log-probability given the parent. ends: a stop token. law:
    what it was drawn from, if it was. children: their ids, which follow each other. depth: levels below the end of the
    text; value: log of how likely the path is; both as the text was at the last ranking."""

    token: int
    parent: int
    rank: int
    score: float
    ends: bool
    law: Tensor | None = None
    children: Sequence[int] = ()
    expanded: bool = False
    depth: int = 0
    value: float = 0.0


_LEAST = -1e6
"""What is not likely at all."""

_GONE = _Node(-1, ROOT, 0, 0.0, ends=True)


class Sprout:
    """Nodes by id; ids are never used again. ROOT is the end of the text, whatever it is at the moment.

    Nothing grows below a stop token that was guessed. One that the text itself ends with did not stop it.

    All nodes are ranked when the odds have changed; between, a step of growth costs what it adds. What the text follows
    takes the same from the value of all that stay, so they are compared as before.
    """

    def __init__(self) -> None:
        self._next = 0
        self._nodes: dict[int, _Node] = {ROOT: _Node(-1, ROOT, 0, 0.0, ends=False)}
        self._odds: tuple[float, ...] | None = None  # that nodes are ranked by; None: they are not
        self._open: list[tuple[float, int]] = []  # heap of (-value, id); of equals, the one that was there first

    def __len__(self) -> int:
        """Nodes below the end of the text."""
        return len(self._nodes) - 1

    def __iter__(self) -> Iterator[int]:
        """Their ids, parents before children."""
        return (id for id in self._nodes if id != ROOT)

    def __contains__(self, id: int) -> bool:
        return id in self._nodes

    def token(self, id: int) -> int:
        return self._nodes[id].token

    def parent(self, id: int) -> int:
        return self._nodes[id].parent

    def score(self, id: int) -> float:
        return self._nodes[id].score

    def children(self, id: int) -> Sequence[int]:
        return self._nodes[id].children

    def path(self, id: int) -> list[int]:
        """Ids from the top down to `id`; empty for ROOT."""
        path = []
        while id != ROOT:
            path.append(id)
            id = self._nodes[id].parent
        return path[::-1]

    def advance(self, tokens: Iterable[int]) -> tuple[list[int], list[int]]:
        """The text grew by `tokens`: (nodes that it followed, oldest first; nodes that are gone without it).

        What hangs below the last token stays, if the text was followed to its end.
        """
        kept, siblings = list[int](), self._nodes[ROOT].children
        for token in tokens:
            heir = next((id for id in siblings if self._nodes[id].token == token), None)
            if heir is None:
                followed = set(kept)
                return kept, [id for id in self.clear() if id not in followed]
            kept.append(heir)
            siblings = self._nodes[heir].children
        return kept, self._follow(kept) if kept else []

    def clear(self) -> list[int]:
        """Forget the tree; the ids that are gone."""
        gone = list(self)
        self._nodes, self._odds = {ROOT: _Node(-1, ROOT, 0, 0.0, ends=False)}, None
        return gone

    def frontier(self, shape: Shape) -> list[int]:
        """Nodes to expand next, best first: at most shape.width, as far as shape.nodes and shape.depth leave room."""
        if self._odds != shape.odds:
            self._rank(shape.odds)
        room = -(-(shape.nodes - len(self)) // shape.topk)
        most, seen, best = max(0, min(shape.width, room)), list[tuple[float, int]](), list[int]()
        lowest = self._nodes[ROOT].depth + shape.depth
        while self._open and len(best) < most:
            entry = heappop(self._open)
            node = self._nodes.get(entry[1], _GONE)  # of ROOT, perhaps an older one's entry
            if not node.expanded and not node.ends and node.value == -entry[0] and entry not in seen[-1:]:
                seen.append(entry)  # who asks may not expand it
                if node.depth < lowest:
                    best.append(entry[1])
        for entry in seen:
            heappush(self._open, entry)
        return best

    def expand(
        self,
        id: int,
        guesses: Iterable[tuple[int, float]],
        shape: Shape,
        stop: Collection[int] = (),
        law: Tensor | None = None,
    ) -> list[int]:
        """Give a node its children: (token, log-probability) pairs, distinct, best first; cut to shape.topk and to the
        room that is left. law: of the only one. Returns their ids."""
        node, nodes, first, odds = self._nodes[id], self._nodes, self._next, self._odds
        most = max(0, min(shape.topk, shape.nodes - len(self)))
        shares = _shares(odds, most) if odds else ()
        for rank, (token, score) in enumerate(islice(guesses, most)):
            child, ends, value = first + rank, token in stop, node.value
            if odds is not None:
                value += shares[rank] if odds else worth(rank, score, odds)
                if not ends:
                    heappush(self._open, (-value, child))
            nodes[child] = _Node(token, id, rank, score, ends, law, (), False, node.depth + 1, value)
            self._next = child + 1
        node.expanded, node.children = True, range(first, self._next)
        return list(node.children)

    def fill(self, id: int, guesses: Sequence[tuple[int, float]], stop: Collection[int] = ()) -> None:
        """Say what the children are of a node that was expanded before its guesses were known, and drop those for which
        there is none; nothing is below these."""
        node = self._nodes[id]
        for child, (token, score) in zip(node.children, guesses, strict=False):
            below = self._nodes[child]
            below.token, below.score, below.ends = token, score, token in stop
        for child in node.children[len(guesses) :]:
            del self._nodes[child]
        node.children = node.children[: len(guesses)]

    def fold(self, id: int) -> None:
        """Take back that a node was expanded; nothing is below its children."""
        node = self._nodes[id]
        for child in node.children:
            del self._nodes[child]
        node.expanded, node.children = False, ()
        heappush(self._open, (-node.value, id))  # perhaps once more

    def proposal(self) -> Proposal:
        """The whole tree."""
        index = dict(zip(self._nodes, range(ROOT, len(self)), strict=True))  # the end of the text is the first of them
        _, *nodes = self._nodes.values()
        laws = tuple([node.law for node in nodes if node.law is not None])
        return Proposal(
            tokens=tuple([node.token for node in nodes]),
            parents=tuple([index[node.parent] for node in nodes]),
            scores=tuple([node.score for node in nodes]),
            laws=laws if len(laws) == len(nodes) else (),
        )

    def _rank(self, odds: tuple[float, ...]) -> None:
        """Compare all nodes by these odds."""
        nodes = self._nodes
        root = nodes[ROOT]
        root.depth, root.value = 0, 0.0
        self._odds, self._open = odds, [] if root.expanded else [(0.0, ROOT)]
        for id, node in islice(nodes.items(), 1, None):
            above = nodes[node.parent]
            node.depth, node.value = above.depth + 1, above.value + worth(node.rank, node.score, odds)
            if not node.expanded and not node.ends:
                self._open.append((-node.value, id))
        heapify(self._open)

    def _follow(self, path: Sequence[int]) -> list[int]:
        """Make the last node of a path the end of the text; the ids that are gone and not on it."""
        gone, heir = list[int](), self._nodes[path[-1]]
        for id in (ROOT, *path[:-1]):
            gone += (child for child in self._nodes[id].children if child not in path)
        for id in gone:  # grows meanwhile
            gone += self._nodes[id].children
        for id in (*path, *gone):
            del self._nodes[id]
        for id in heir.children:
            self._nodes[id].parent = ROOT
        heir.ends = False
        self._nodes[ROOT] = heir
        if not heir.expanded:
            heappush(self._open, (-heir.value, ROOT))
        return sorted(gone)


def worth(rank: int, score: float | None, odds: tuple[float, ...]) -> float:
    """Log of how likely a node is right, given that its parent is: by its rank, or by its own score without odds.

    A multiple of 2**-20, so that sums are exact and paths of equal worth are equal wherever one begins to count.
    """
    if odds:
        return _shares(odds, rank + 1)[rank]
    return _rounded(min(0.0, score) if score is not None else (rank + 1) * math.log(0.5))


@lru_cache(maxsize=1024)
def _shares(odds: tuple[float, ...], count: int) -> tuple[float, ...]:
    """What guesses of the first ranks are worth."""
    return tuple(_rounded(math.log(max(share(rank, odds), 1e-9))) for rank in range(count))


def _rounded(value: float) -> float:
    return round(max(value, _LEAST) * 2**20) * 2.0**-20
