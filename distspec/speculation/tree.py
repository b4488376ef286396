"""The speculation tree of one request: nodes, outcomes, the walk that commits.

Knows tokens and parents. Does not know workers, time, or why a node was drafted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from msgspec import Struct

from distspec.protocol.odds import share
from distspec.protocol.values import TokenLogprobs

UNKNOWN = 0.5
"""How likely a node is taken to be where nobody has an opinion; each further rank halves it."""


class TreeNode(Struct, gc=False):
    """A token below the root. level: its place in the text, counted from the first root. score: log-probability given
    its parent as the drafter sees it, None without an opinion. children: ids by token, the best guess first; None: it
    has none. outcome: what the target draws after its path, None until a verdict came; logprobs: of that, if it said
    them."""

    token: int
    parent: int
    level: int = 0
    score: float | None = None
    children: dict[int, int] | None = None
    outcome: int | None = None
    logprobs: TokenLogprobs | None = None


class Step(Struct, frozen=True):
    """One token that the walk committed. root: the root whose outcome it was. node: the drafted node that carried
    it, of which rank among its siblings, 0 the best guess; both None for a fresh root. children: how many guesses there
    were. logprobs: of the token, if the verdict said them.

    died: submitted nodes that can no longer be committed, children after their parents.
    """

    token: int
    root: int
    node: int | None
    rank: int | None
    children: int
    died: tuple[int, ...]
    logprobs: TokenLogprobs | None = None


class Tree:
    """Nodes below a root, which stands for the last committed token.

    Every node, the root too, has an id that is never used again, so a verdict always finds its node or
    nobody. Coupled verification (a child is accepted if and only if its token is its parent's outcome)
    makes the walk a function of outcomes alone, whatever the order in which they arrive.

    Workers wait while the walk goes on, and most of a large tree dies in it without having been submitted. So a step
    looks at submitted nodes only: the rest is out of reach from then on, is counted out when somebody asks, and is
    freed when something new is hung. A child's id is above its parent's, so what is below the root has ids above its.
    """

    def __init__(self) -> None:
        self.root = self._first = self._next = 0
        self._nodes = list[TreeNode]()  # by id, from `_first` on
        self._known: tuple[int, int] | None = None  # see `_extent`
        self._submitted: set[int] = set()
        self._last = _Proposal((-1, -1, 0, 0), (), (), [])
        self._plant(-1, 0)

    def __len__(self) -> int:
        """Live nodes below the root."""
        return self._extent()[0]

    def height(self) -> int:
        """Levels below the root."""
        return self._extent()[1] - self._nodes[self.root - self._first].level

    def __contains__(self, node: int) -> bool:
        """Whether this is the root or below it. Costs its depth, unless it was submitted."""
        if node in self._submitted:
            return True
        while self.root < node < self._next:
            node = self._nodes[node - self._first].parent
        return node == self.root

    def __getitem__(self, node: int) -> TreeNode:
        """A live node."""
        return self._nodes[node - self._first]

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
        opinions: Sequence[float | None] = scores or [None] * len(tokens)
        if not len(tokens) == len(parents) == len(opinions):
            raise ValueError(f"{len(tokens)} tokens, {len(parents)} parents, {len(opinions)} scores")
        self._trim(2 * len(tokens))
        nodes, start, node = self._nodes, self._first, self._next
        size, lowest = self._extent()
        stop, end = node + most - size, self[self.root].level + deepest
        place, tokens, parents = (self.root, leaf, most, deepest), tuple(tokens), tuple(parents)
        ids = self._last.ids.copy() if self._last.goes_on(place, tokens, parents) else []
        rest = slice(len(ids), None)
        for token, index, score in zip(tokens[rest], parents[rest], opinions[rest], strict=True):
            parent = leaf if index < 0 else ids[index]
            known = None
            if parent is not None:
                above = nodes[parent - start]
                children, level = above.children, above.level + 1
                known = children.get(token) if children else None
                if known is None and node < stop and level <= end:
                    if children is None:
                        children = above.children = {}
                    known = children[token] = node
                    nodes.append(TreeNode(token, parent, level, score))
                    node += 1
                    if level > lowest:
                        lowest = level
            ids.append(known)
        self._known = size + node - self._next, lowest
        if node > self._next:
            self._next, self._last = node, _Proposal(place, tokens, parents, ids)
        return ids.copy()

    def submit(self, nodes: Iterable[int]) -> None:
        """Somebody outside knows these nodes now, and those above them: steps say which of them died."""
        known, start, root, submitted = self._nodes, self._first, self.root, self._submitted
        for node in nodes:
            while node != root and node not in submitted:
                submitted.add(node)
                node = known[node - start].parent

    def judge(self, node: int, outcome: int, logprobs: TokenLogprobs | None = None) -> bool:
        """Record a verdict. The first one is law; one for a node that is gone says nothing."""
        if node not in self:
            return False
        known = self[node]
        if known.outcome is not None:
            return False
        known.outcome, known.logprobs = outcome, logprobs
        return True

    def step(self) -> Step | None:
        """Commit one token if the root's outcome is known: the child that carries it becomes the root and
        its siblings die; without such a child everything dies and a fresh root takes its place."""
        id, root = self.root, self[self.root]
        if root.outcome is None:
            return None
        children = root.children or {}
        heir = children.get(root.outcome)
        died = self._bury([child for child in children.values() if child != heir])
        rank = None
        if heir is None:
            self._plant(root.outcome, root.level + 1)
        else:
            rank = list(children).index(root.outcome)
            self.root, self._known = heir, None
            self[heir].parent = -1
            self._submitted.discard(heir)
        return Step(root.outcome, id, heir, rank, len(children), died, root.logprobs)

    def reset(self) -> None:
        """Void everything: a fresh root for the same committed token."""
        self._submitted.clear()
        self._plant(-1, self[self.root].level)

    def path(self, node: int) -> list[int]:
        """Ids from the root's child down to `node`; empty for the root."""
        ids = []
        while node != self.root:
            ids.append(node)
            node = self[node].parent
        return ids[::-1]

    def ranked(self, odds: Sequence[float], ranks: int | None = None) -> Iterator[tuple[float, int]]:
        """(path probability, id) of every node below the root, the likeliest first, parents before children; where
        `ranks` is given, of those only whose paths are of the first so many guesses.

        A node's share of its parent is the drafter's own where `odds` is empty and it has one, else odds[rank].
        Nodes are searched from the root as they are asked for; the tree must stay as it is meanwhile.
        """
        nodes, start = self._nodes, self._first
        open_ = [(-1.0, self.root)]
        while open_:
            value, node = heappop(open_)
            if node != self.root:
                yield -value, node
            children = nodes[node - start].children
            for rank, child in enumerate(islice(children.values(), ranks) if children else ()):
                heappush(open_, (value * _share(nodes[child - start].score, rank, odds), child))

    def ids(self) -> list[int]:
        """The root and all nodes below it, parents first."""
        return [node for level in self._levels() for node in level]

    def shape(self) -> tuple[list[int], list[int], list[int]]:
        """(ids, tokens, parents) of all nodes below the root, parents first; parents as indices, -1 for the root."""
        ids = sorted(self.ids())[1:]
        index = {self.root: -1} | {node: i for i, node in enumerate(ids)}
        return ids, [self[n].token for n in ids], [index[self[n].parent] for n in ids]

    def depth(self, node: int) -> int:
        """Levels from the root down to this node."""
        return self._nodes[node - self._first].level - self._nodes[self.root - self._first].level

    def token(self, node: int) -> int:
        return self[node].token

    def _levels(self) -> Iterator[list[int]]:
        """Ids of the root, of its children, of theirs."""
        nodes, start, level = self._nodes, self._first, [self.root]
        while level:
            yield level
            families = [nodes[node - start].children for node in level]
            level = [child for children in families if children for child in children.values()]

    def _extent(self) -> tuple[int, int]:
        """Nodes below the root, and the lowest level of any; counted once after a step left some behind."""
        if self._known is None:
            widths = [len(level) for level in self._levels()]
            self._known = sum(widths) - 1, self[self.root].level + len(widths) - 1
        return self._known

    def _plant(self, token: int, level: int) -> None:
        """A fresh root."""
        self.root, self._known = self._next, (0, level)
        self._next += 1
        self._nodes.append(TreeNode(token, -1, level))
        self._trim(2)

    def _trim(self, most: int) -> None:
        """Free what the walk has left behind, or so many of it: that takes longer than one would think."""
        gone = min(most, self.root - self._first)
        del self._nodes[:gone]
        self._first += gone

    def _bury(self, tops: list[int]) -> tuple[int, ...]:
        """Those of these nodes that were submitted, and all below them that were, parents first: they are no longer."""
        submitted = self._submitted
        gone = [node for node in tops if node in submitted]
        for node in gone:
            submitted.discard(node)
            children = self[node].children
            if children:
                gone.extend([child for child in children.values() if child in submitted])
        return tuple(gone)


class _Proposal(NamedTuple):
    """What last brought new nodes: root, leaf and bounds, tokens and parents, and the ids that these got."""

    place: tuple[int, int, int, int]
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    ids: list[int | None]

    def goes_on(self, place: tuple[int, int, int, int], tokens: tuple[int, ...], parents: tuple[int, ...]) -> bool:
        """Whether a proposal begins with all of this, so that its first ids are known. A drafter says its whole tree
        each time, and mostly it has only grown."""
        count = len(self.ids)
        return place == self.place and tokens[:count] == self.tokens and parents[:count] == self.parents


def _share(score: float | None, rank: int, odds: Sequence[float]) -> float:
    """How likely a node is right, given that its parent is."""
    if odds:
        return share(rank, odds)
    return min(1.0, math.exp(score)) if score is not None else UNKNOWN ** (rank + 1)
