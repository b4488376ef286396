"""The speculation tree of one request: nodes, outcomes, the walk that commits.

Knows tokens and parents. Does not know workers, time, or why a node was drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class TreeNode:
    """A token below the root. outcome: what the target draws after its path, None until a verdict came."""

    token: int
    parent: int
    outcome: int | None = None
    children: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Step:
    """One token that the walk committed. node: the drafted node that carried it, or None for a fresh root.

    died: nodes that can no longer be committed, children after their parents.
    """

    token: int
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

    def add(self, leaf: int, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Hang a proposal below `leaf`: parents[i] is an index into `tokens` before i, or -1 for the leaf.

        A child that is already there is not doubled: its id is returned, and grandchildren join it.
        Returns the node id of each token.
        """
        ids: list[int] = []
        for token, index in zip(tokens, parents, strict=True):
            parent = leaf if index < 0 else ids[index]
            ids.append(self._child(parent, token) or self._new(parent, token))
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
        root = self.nodes[self.root]
        if root.outcome is None:
            return None
        heir = self._child(self.root, root.outcome)
        died = tuple(n for child in root.children if child != heir for n in self._below(child))
        for node in (*died, self.root):
            del self.nodes[node]
        if heir is None:
            self.root = self._id()
            self.nodes[self.root] = TreeNode(token=root.outcome, parent=-1)
        else:
            self.root = heir
            self.nodes[heir].parent = -1
        return Step(token=root.outcome, node=heir, died=died)

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

    def tip(self) -> int:
        """The deepest node along first children: where a chain goes on."""
        node = self.root
        while children := self.nodes[node].children:
            node = children[0]
        return node

    def chain(self) -> list[int]:
        """Ids along first children, below the root."""
        return self.path(self.tip())

    def token(self, node: int) -> int:
        return self.nodes[node].token

    def _child(self, parent: int, token: int) -> int | None:
        for child in self.nodes[parent].children:
            if self.nodes[child].token == token:
                return child
        return None

    def _new(self, parent: int, token: int) -> int:
        node = self._id()
        self.nodes[node] = TreeNode(token=token, parent=parent)
        self.nodes[parent].children.append(node)
        return node

    def _id(self) -> int:
        node, self._next = self._next, self._next + 1
        return node

    def _below(self, node: int) -> Iterator[int]:
        yield node
        for child in self.nodes[node].children:
            yield from self._below(child)
