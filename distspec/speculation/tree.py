"""The speculation tree of one request: nodes, outcomes, the walk that commits.

Knows tokens and parents. Does not know workers, time, or why a node was drafted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from distspec.protocol.odds import share

UNKNOWN = 0.5
"""How likely a node is taken to be where nobody has an opinion; each further rank halves it."""


@dataclass(slots=True)
class TreeNode:
    """A token below the root. rank: among its siblings as drafted, 0 the best guess. score: log-probability given its
    parent as the drafter sees it, None without an opinion. outcome: what the target draws after its path, None until
    a verdict came."""

    token: int
    parent: int
    rank: int = 0
    score: float | None = None
    outcome: int | None = None
    children: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    """One token that the walk committed. root: the root whose outcome it was. node: the drafted node that carried
    it, or None for a fresh root.

    died: nodes that can no longer be committed, children after their parents.
    """

    token: int
    root: int
    node: int | None
    died: tuple[int, ...]


class Tree:
    """Nodes below a root, which stands for the last committed token.

    Every node, the root too, has an id that is never used again, so a verdict always finds its node or
    nobody. Coupled verification (a child is accepted if and only if its token is its parent's outcome)
    makes the walk a function of outcomes alone, whatever the order in which they arrive.
    """

    def __init__(self) -> None:
        self._next = 1
        self.root = 0
        self.nodes: dict[int, TreeNode] = {0: TreeNode(token=-1, parent=-1)}

    def __len__(self) -> int:
        """Live nodes below the root."""
        return len(self.nodes) - 1

    def __contains__(self, node: int) -> bool:
        return node in self.nodes

    def add(
        self, leaf: int, tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float] = (), most: int = 2**31
    ) -> list[int | None]:
        """Hang a proposal below `leaf`: parents[i] is an index into `tokens` before i, or -1 for the leaf.

        A child that is already there is not doubled: its id is returned, and grandchildren join it. Where the tree
        has `most` nodes already, new ones are left out, and what would hang below them. Returns the node id of each
        token, None where it was left out.
        """
        ids: list[int | None] = []
        for i, (token, index) in enumerate(zip(tokens, parents, strict=True)):
            parent = leaf if index < 0 else ids[index]
            node = None
            if parent is not None:
                node = self._child(parent, token)
                if node is None and len(self) < most:
                    node = self._new(parent, token, scores[i] if scores else None)
            ids.append(node)
        return ids

    def judge(self, node: int, outcome: int) -> bool:
        """Record a verdict. The first one is law; one for a node that is gone says nothing."""
        known = self.nodes.get(node)
        if known is None or known.outcome is not None:
            return False
        known.outcome = outcome
        return True

    def step(self) -> Step | None:
        """Commit one token if the root's outcome is known: the child that carries it becomes the root and
        its siblings die; without such a child everything dies and a fresh root takes its place."""
        id, root = self.root, self.nodes[self.root]
        if root.outcome is None:
            return None
        heir = self._child(self.root, root.outcome)
        died = tuple(n for child in root.children if child != heir for n in self._below(child))
        for node in (*died, id):
            del self.nodes[node]
        if heir is None:
            self.root = self._id()
            self.nodes[self.root] = TreeNode(token=root.outcome, parent=-1)
        else:
            self.root = heir
            self.nodes[heir].parent = -1
        return Step(token=root.outcome, root=id, node=heir, died=died)

    def reset(self) -> None:
        """Void everything: a fresh root for the same committed token."""
        self.root = self._id()
        self.nodes = {self.root: TreeNode(token=-1, parent=-1)}

    def path(self, node: int) -> list[int]:
        """Ids from the root's child down to `node`; empty for the root."""
        ids = []
        while node != self.root:
            ids.append(node)
            node = self.nodes[node].parent
        return ids[::-1]

    def ranked(self, odds: Sequence[float]) -> list[tuple[float, int]]:
        """(path probability, id) of every node below the root, the likeliest first, parents before children.

        A node's share of its parent is the drafter's own where `odds` is empty and it has one, else odds[rank].
        """
        value = {self.root: 1.0}
        todo = [self.root]
        for parent in todo:
            for node in self.nodes[parent].children:
                value[node] = value[parent] * self._share(node, odds)
                todo.append(node)
        return sorted(((value[node], node) for node in todo[1:]), key=lambda pair: (-pair[0], pair[1]))

    def shape(self) -> tuple[list[int], list[int], list[int]]:
        """(ids, tokens, parents) of all nodes below the root, parents first; parents as indices, -1 for the root."""
        ids = [node for node in self.nodes if node != self.root]
        index = {self.root: -1} | {node: i for i, node in enumerate(ids)}
        return ids, [self.nodes[n].token for n in ids], [index[self.nodes[n].parent] for n in ids]

    def height(self) -> int:
        """Levels below the root."""
        levels, level = 0, self.nodes[self.root].children
        while level:
            levels += 1
            level = [child for node in level for child in self.nodes[node].children]
        return levels

    def rank(self, node: int) -> int:
        return self.nodes[node].rank

    def token(self, node: int) -> int:
        return self.nodes[node].token

    def _child(self, parent: int, token: int) -> int | None:
        for child in self.nodes[parent].children:
            if self.nodes[child].token == token:
                return child
        return None

    def _new(self, parent: int, token: int, score: float | None) -> int:
        node, siblings = self._id(), self.nodes[parent].children
        self.nodes[node] = TreeNode(token=token, parent=parent, rank=len(siblings), score=score)
        siblings.append(node)
        return node

    def _share(self, node: int, odds: Sequence[float]) -> float:
        known = self.nodes[node]
        if not odds:
            return min(1.0, math.exp(known.score)) if known.score is not None else UNKNOWN ** (known.rank + 1)
        return share(known.rank, odds)

    def _id(self) -> int:
        node, self._next = self._next, self._next + 1
        return node

    def _below(self, node: int) -> Iterator[int]:
        yield node
        for child in self.nodes[node].children:
            yield from self._below(child)
