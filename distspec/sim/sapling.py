"""The tree of guesses that a simulated drafter keeps below the end of one text.

Knows tokens, ranks and the shape that is asked for. Does not know where guesses come from, nor time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush

from msgspec import Struct

from distspec.protocol.messages import Draft, Drafted
from distspec.protocol.odds import share
from distspec.protocol.values import ROOT, Shape


class Leaf(Struct):
    """worth: log of how likely the path is. position: in the text. score: log-probability given the parent."""

    token: int
    parent: int
    position: int
    worth: float
    score: float = 0.0
    children: range = range(0)


class Sapling:
    """The best nodes without children are found in a heap: what is committed changes the worth of all that live by the
    same factor, so their order stays."""

    def __init__(self) -> None:
        self.root = 0
        self.nodes = {0: Leaf(-1, -1, -1, 0.0)}
        self._open: list[tuple[float, int]] = []
        self._next = 1

    def append(self, token: int) -> None:
        """The text goes on with this token; what does not is forgotten."""
        old = self.nodes.pop(self.root)
        heir = next((child for child in old.children if self.nodes[child].token == token), None)
        if heir is None:
            self.root, self._next = self._next, self._next + 1
            self.nodes = {self.root: Leaf(token, -1, old.position + 1, 0.0)}
            self._open = [(0.0, self.root)]
            return
        dead = [child for child in old.children if child != heir]
        for id in dead:
            dead.extend(self.nodes.pop(id).children)
        self.root = heir

    def frontier(self, shape: Shape) -> list[int]:
        """The best nodes without children: at most shape.width, as far as shape.nodes and shape.depth leave room."""
        room, picked, deep = shape.nodes - len(self.nodes) + 1, list[int](), list[tuple[float, int]]()
        lowest = self.nodes[self.root].position + shape.depth
        while self._open and room > 0 and len(picked) < shape.width:
            entry = heappop(self._open)
            node = self.nodes.get(entry[1])
            if node is None:
                continue
            if node.position >= lowest:
                deep.append(entry)
                continue
            picked.append(entry[1])
            room -= shape.topk
        for entry in deep:
            heappush(self._open, entry)
        return picked

    def expand(self, id: int, tokens: Sequence[int], shape: Shape, odds: Sequence[float]) -> None:
        """Give a node its children, best first, as far as there is room. odds: how often they are right."""
        node, first = self.nodes[id], self._next
        fitting = tokens[: max(0, shape.nodes - len(self.nodes) + 1)]
        scores = _logs(tuple(odds), len(fitting))
        ranked = _logs(shape.odds, len(fitting)) if shape.odds else scores
        for child, (token, score, step) in enumerate(zip(fitting, scores, ranked, strict=True), first):
            worth = node.worth + step
            self.nodes[child] = Leaf(token, id, node.position + 1, worth, score)
            heappush(self._open, (-worth, child))
        self._next = first + len(fitting)
        node.children = range(first, self._next)

    def drafted(self, message: Draft) -> Drafted:
        """The whole tree, in answer to this."""
        leaves = [leaf for id, leaf in self.nodes.items() if id != self.root]
        index = {id: i for i, id in enumerate(id for id in self.nodes if id != self.root)}
        return Drafted(
            request=message.request,
            epoch=message.epoch,
            task=message.task,
            base=self.nodes[self.root].position + 1,
            tokens=tuple([leaf.token for leaf in leaves]),
            parents=tuple([index.get(leaf.parent, ROOT) for leaf in leaves]),
            scores=tuple([leaf.score for leaf in leaves]),
        )


@lru_cache
def _logs(odds: tuple[float, ...], count: int) -> list[float]:
    """Of how likely guesses of the first ranks are right."""
    return [math.log(max(share(rank, odds), 1e-9)) for rank in range(count)]
