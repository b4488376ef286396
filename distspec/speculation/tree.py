"""The speculation tree of one request: nodes, outcomes, the walk that commits.

Knows tokens and parents. Does not know workers, time, or why a node was drafted.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from msgspec import Struct

from distspec.protocol.odds import share
from distspec.protocol.values import TokenLogprobs

UNKNOWN = 0.5
"""How likely a node is taken to be where nobody has an opinion; each further rank halves it."""


class TreeNode(Struct):
    """A token below the root. rank: among its siblings as drafted, 0 the best guess. score: log-probability given its
    parent as the drafter sees it, None without an opinion. outcome: what the target draws after its path, None until
    a verdict came; logprobs: of that, if it said them. level: its place in the text, counted from the first root.
    children: ids by token, by rank."""

    token: int
    parent: int
    level: int = 0
    rank: int = 0
    score: float | None = None
    outcome: int | None = None
    logprobs: TokenLogprobs | None = None
    children: dict[int, int] = {}


@dataclass(frozen=True, slots=True)
class Step:
    """One token that the walk committed. root: the root whose outcome it was. node: the drafted node that carried
    it, or None for a fresh root. logprobs: of the token, if the verdict said them.

    died: nodes that can no longer be committed, children after their parents.
    """

    token: int
    root: int
    node: int | None
    died: tuple[int, ...]
    logprobs: TokenLogprobs | None = None


class Tree:
    """Nodes below a root, which stands for the last committed token.

    Every node, the root too, has an id that is never used again, so a verdict always finds its node or
    nobody. Coupled verification (a child is accepted if and only if its token is its parent's outcome)
    makes the walk a function of outcomes alone, whatever the order in which they arrive.

    What an operation costs grows with what it adds, drops or returns, not with what else is there.
    """

    def __init__(self) -> None:
        self._next = 1
        self.root = 0
        self.nodes: dict[int, TreeNode] = {0: TreeNode(token=-1, parent=-1)}
        self._widths: deque[int] = deque()  # of each level below the root, none of them 0

    def __len__(self) -> int:
        """Live nodes below the root."""
        return len(self.nodes) - 1

    def __contains__(self, node: int) -> bool:
        return node in self.nodes

    @property
    def newest(self) -> int:
        """The highest id that a node ever had."""
        return self._next - 1

    def add(
        self,
        leaf: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        scores: Sequence[float] = (),
        most: int = 2**31,
        deepest: int = 2**31,
    ) -> list[int | None]:
        """Hang a proposal below `leaf`: parents[i] is an index into `tokens` before i, or -1 for the leaf.

        A child that is already there is not doubled: its id is returned, and grandchildren join it. Where the tree
        has `most` nodes already, or `deepest` levels below its root, new ones are left out, and what would hang below
        them. Returns the node id of each token, None where it was left out; new ids are consecutive.
        """
        nodes, first, room = self.nodes, self._next, most - len(self)
        ids, levels, deepest = list[int | None](), list[int](), nodes[self.root].level + deepest
        opinions: Sequence[float | None] = scores or [None] * len(tokens)
        for token, index, score in list(zip(tokens, parents, opinions, strict=True)):
            parent = leaf if index < 0 else ids[index]
            node = None
            if parent is not None:
                above = nodes[parent]
                children, level = above.children, above.level
                node = children.get(token)
                if node is None and len(levels) < room and level < deepest:
                    node = children[token] = first + len(levels)
                    nodes[node] = TreeNode(token, parent, level + 1, len(children) - 1, score)
                    levels.append(level)
            ids.append(node)
        self._next += len(levels)
        self._widen(levels)
        return ids

    def judge(self, node: int, outcome: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Record a verdict. The first one is law; one for a node that is gone says nothing."""
        known = self.nodes.get(node)
        if known is None or known.outcome is not None:
            return False
        known.outcome, known.logprobs = outcome, logprobs
        return True

    def step(self) -> Step | None:
        """Commit one token if the root's outcome is known: the child that carries it becomes the root and
        its siblings die; without such a child everything dies and a fresh root takes its place."""
        id, root = self.root, self.nodes[self.root]
        if root.outcome is None:
            return None
        heir = root.children.get(root.outcome)
        died = self._take_out([child for child in root.children.values() if child != heir])
        del self.nodes[id]
        if heir is None:
            self._plant(root.outcome, root.level + 1)
        else:
            self.root = heir
            self.nodes[heir].parent = -1
            self._widths.popleft()
        return Step(token=root.outcome, root=id, node=heir, died=died, logprobs=root.logprobs)

    def reset(self) -> None:
        """Void everything: a fresh root for the same committed token."""
        level = self.nodes[self.root].level
        self.nodes.clear()
        self._widths.clear()
        self._plant(-1, level)

    def path(self, node: int) -> list[int]:
        """Ids from the root's child down to `node`; empty for the root."""
        ids = []
        while node != self.root:
            ids.append(node)
            node = self.nodes[node].parent
        return ids[::-1]

    def ranked(self, odds: Sequence[float], ranks: int | None = None) -> Iterator[tuple[float, int]]:
        """(path probability, id) of every node below the root, the likeliest first, parents before children; where
        `ranks` is given, of those only whose paths are of the first so many guesses.

        A node's share of its parent is the drafter's own where `odds` is empty and it has one, else odds[rank].
        Nodes are searched from the root as they are asked for; the tree must stay as it is meanwhile.
        """
        nodes = self.nodes
        open_ = [(-1.0, self.root)]
        while open_:
            value, node = heappop(open_)
            if node != self.root:
                yield -value, node
            for child in islice(nodes[node].children.values(), ranks):
                heappush(open_, (value * _share(nodes[child], odds), child))

    def shape(self) -> tuple[list[int], list[int], list[int]]:
        """(ids, tokens, parents) of all nodes below the root, parents first; parents as indices, -1 for the root."""
        ids = [node for node in self.nodes if node != self.root]
        index = {self.root: -1} | {node: i for i, node in enumerate(ids)}
        return ids, [self.nodes[n].token for n in ids], [index[self.nodes[n].parent] for n in ids]

    def height(self) -> int:
        """Levels below the root."""
        return len(self._widths)

    def depth(self, node: int) -> int:
        """Levels from the root down to this node."""
        return self.nodes[node].level - self.nodes[self.root].level

    def rank(self, node: int) -> int:
        return self.nodes[node].rank

    def token(self, node: int) -> int:
        return self.nodes[node].token

    def _widen(self, parents: list[int]) -> None:
        """Count new nodes, by the levels of their parents: each below one that is there or comes before it."""
        top = self.nodes[self.root].level
        for level, more in Counter(parents).items():
            if level - top == len(self._widths):
                self._widths.append(0)
            self._widths[level - top] += more

    def _plant(self, token: int, level: int) -> None:
        """A fresh root."""
        self.root, self._next = self._next, self._next + 1
        self.nodes[self.root] = TreeNode(token, -1, level)

    def _take_out(self, tops: list[int]) -> tuple[int, ...]:
        """Remove these nodes below the root, and all that hangs below them; who that is, parents first."""
        gone, levels, top = tops, list[int](), self.nodes[self.root].level + 1
        for node in gone:
            known = self.nodes.pop(node)
            gone.extend(known.children.values())
            levels.append(known.level - top)
        for level, less in Counter(levels).items():
            self._widths[level] -= less
        while self._widths and not self._widths[-1]:
            self._widths.pop()
        return tuple(gone)


def _share(node: TreeNode, odds: Sequence[float]) -> float:
    """How likely a node is right, given that its parent is."""
    if odds:
        return share(node.rank, odds)
    return min(1.0, math.exp(node.score)) if node.score is not None else UNKNOWN ** (node.rank + 1)
