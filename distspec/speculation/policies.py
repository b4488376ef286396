"""Policies: which nodes of a tree are judged where, and how the drafter grows it meanwhile.

Pure: a policy sees one request's tree and what is in flight, and returns wishes. It does not know messages,
KV, credits or time; the coordinator turns a submission into whatever the verifier still lacks of the path.

All of them rest on one order, the probability of a node's path: what is judged next are the likeliest nodes
nobody judges yet, and what grows next are the likeliest without children. They differ in when they do either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Protocol

from msgspec import Struct

from distspec.speculation.sizes import Sizes
from distspec.speculation.tree import Tree


class Situation(Struct, frozen=True):
    """What a policy may look at.

    in_flight: ids of nodes (the root too) whose verdict is on its way. free: verifiers that hold the
    request and have nothing of it in flight, the preferred first. total: verifiers in use, busy ones too.
    drafting: a draft is on its way. asked: the drafter was asked since the root changed. dry: it has nothing to add
    to the present tree. quick: there is a fallback drafter that answers at once. depth: most levels below the root.
    odds: how often a guess of each rank is right; empty: the drafter's own confidence counts.
    """

    tree: Tree
    in_flight: Collection[int]
    free: Sequence[str]
    total: int
    drafting: bool
    asked: bool
    dry: bool
    quick: bool
    depth: int
    sizes: Sizes
    odds: Sequence[float]

    def waiting(self, ranks: int | None = None) -> Iterator[int]:
        """Nodes that nobody judges yet, the likeliest first, parents before children; where `ranks` is given, on paths
        of the first so many guesses only. Costs what is taken of it."""
        tree = self.tree
        for _, node in tree.ranked(self.odds, ranks):
            if node not in self.in_flight and tree[node].outcome is None:
                yield node

    @property
    def is_open(self) -> bool:
        """Nobody judges the root."""
        return self.tree.root not in self.in_flight

    @property
    def is_judged(self) -> bool:
        """A verdict that still counts is on its way; some are of what is dead."""
        return any(node in self.tree for node in self.in_flight)

    def best(self, most: int, ranks: int) -> tuple[int, ...]:
        """The likeliest nodes that wait, on paths of the first `ranks` guesses only."""
        return tuple(islice(self.waiting(ranks), most))


class Submission(Struct, frozen=True):
    """Judge these nodes there. The root is judged with them, since it is on every path."""

    verifier: str
    nodes: tuple[int, ...]


class Growth(Struct, frozen=True):
    """Let the drafter go on for `steps`, expanding `width` nodes in each by `topk` guesses, to at most `nodes` live
    ones. quick: let the fallback drafter do it, at once."""

    steps: int
    topk: int
    width: int
    nodes: int
    quick: bool = False


class Policy(Protocol):
    def submit(self, now: Situation) -> list[Submission]: ...

    def grow(self, now: Situation) -> Growth | None: ...


class Plain:
    """`ar`: the root only, one token a forward."""

    def submit(self, now: Situation) -> list[Submission]:
        if now.in_flight or not now.free:
            return []
        return [Submission(now.free[0], ())]

    def grow(self, now: Situation) -> Growth | None:
        return None


class Sequential:
    """`sd` (arXiv 2211.17192): draft, let one verifier judge the best of it with the root, and only then draft again.

    With topk > 1 a tree, of which the likeliest nodes are judged (EAGLE-2, arXiv 2406.16858).
    """

    def submit(self, now: Situation) -> list[Submission]:
        if now.in_flight or not now.free or now.drafting or self.grow(now) is not None:
            return []
        return [Submission(now.free[0], now.best(now.sizes.nodes, now.sizes.topk))]

    def grow(self, now: Situation) -> Growth | None:
        sizes = now.sizes
        steps = min(sizes.steps, now.depth) - now.tree.height()
        if now.in_flight or now.drafting or now.asked or now.dry or steps < 1:
            return None
        return Growth(steps, sizes.topk, sizes.topk, max(sizes.max_live_nodes, sizes.nodes))


class Distributed:
    """`dsi` (arXiv 2405.14105): the drafter runs ahead along its top path without waiting; the root alone goes out
    at once, so that a drafter which is always wrong costs nothing, and every `lookahead` drafted nodes go to the
    next free verifier."""

    def submit(self, now: Situation) -> list[Submission]:
        free, out = list(now.free), []
        waiting = list(now.best(len(now.tree), 1))
        chunk = now.sizes.lookahead
        if free and now.is_open and now.tree[now.tree.root].outcome is None:
            out.append(Submission(free.pop(0), tuple(waiting[: now.sizes.nodes])))
            waiting = waiting[now.sizes.nodes :]
        while free and waiting and (len(waiting) >= chunk or self._is_stuck(now)):
            out.append(Submission(free.pop(0), tuple(waiting[:chunk])))
            waiting = waiting[chunk:]
        return out

    def grow(self, now: Situation) -> Growth | None:
        steps = min(self._ahead(now), now.depth) - now.tree.height()
        if now.drafting or now.dry or steps < 1:
            return None
        return Growth(min(now.sizes.lookahead, steps), 1, 1, now.sizes.max_live_nodes)

    def _ahead(self, now: Situation) -> int:
        """Levels that keep every verifier busy once while the next chunk is drafted."""
        return min(now.sizes.max_live_nodes, now.sizes.lookahead * (now.total + 1))

    def _is_stuck(self, now: Situation) -> bool:
        return not now.drafting and self.grow(now) is None


class Pearl(Distributed):
    """`pearl` (arXiv 2408.11850): one verifier judges the first drafted node early, then what was drafted meanwhile,
    `steps` at a time; the drafter goes on along the top path."""

    def submit(self, now: Situation) -> list[Submission]:
        first = now.is_open and now.tree[now.tree.root].outcome is None
        if now.in_flight or not now.free or (first and not len(now.tree) and not self._is_stuck(now)):
            return []
        waiting = now.best(now.sizes.steps, 1)
        if not first and len(waiting) < now.sizes.steps and not self._is_stuck(now):
            return []
        return [Submission(now.free[0], waiting)] if first or waiting else []

    def _ahead(self, now: Situation) -> int:
        return min(now.sizes.max_live_nodes, 2 * now.sizes.steps)


class Branching(Sequential):
    """`ssd` (Speculative Speculative Decoding, arXiv 2603.03251): while a forward is in flight, the drafter grows
    branches below every node for its likely outcomes, so that an outcome that was foreseen finds its next round
    drafted; one that was not falls back to the quick drafter where there is one, else to drafting as `sd` does."""

    def submit(self, now: Situation) -> list[Submission]:
        if now.is_judged or not now.free or (now.drafting and not self._is_ripe(now)):
            return []
        if not self._is_ripe(now) and self.grow(now) is not None:
            return []
        return [Submission(now.free[0], now.best(now.sizes.nodes, now.sizes.topk))]

    def grow(self, now: Situation) -> Growth | None:
        is_asked = now.drafting and now.asked  # about this root: else what the drafter does now may be dead already
        if is_asked or now.dry or not now.depth or len(now.tree) >= now.sizes.max_live_nodes:
            return None
        sizes = now.sizes
        if now.is_judged:
            return Growth(sizes.lookahead, sizes.branch_topk, sizes.branch_width, sizes.max_live_nodes)
        if now.quick and not now.asked and not len(now.tree):
            return Growth(sizes.steps, 1, 1, sizes.max_live_nodes, quick=True)
        if self._is_ripe(now):
            return None
        return Growth(
            min(sizes.steps, now.depth) - now.tree.height(), sizes.branch_topk, sizes.topk, sizes.max_live_nodes
        )

    def _is_ripe(self, now: Situation) -> bool:
        """What is drafted is as deep as a round that waits for its draft would be, or the drafter was waited for once:
        where guesses are poor it grows more broadly than deep, and the levels that lack are not worth a second wait."""
        if now.tree.height() >= min(now.sizes.steps, now.depth):
            return True
        return now.asked and len(now.tree) > 0 and (now.quick or not now.drafting)


class BranchVerifying(Branching):
    """`bvsp`: as `ssd`; and once `branch_nodes` wait, a further verifier judges them before the first has answered."""

    def submit(self, now: Situation) -> list[Submission]:
        out = super().submit(now)
        if not now.is_judged and not out:
            return []
        taken = {node for wish in out for node in wish.nodes}
        waiting = (node for node in now.waiting() if node not in taken)
        enough = 1 if self._is_stuck(now) else now.sizes.branch_nodes
        for verifier in now.free[len(out) :]:
            nodes = tuple(islice(waiting, max(now.sizes.nodes, now.sizes.branch_nodes)))
            if len(nodes) < enough:
                break
            out.append(Submission(verifier, nodes))
        return out

    def _is_stuck(self, now: Situation) -> bool:
        return not now.drafting and (now.dry or not now.depth or len(now.tree) >= now.sizes.max_live_nodes)


POLICIES: dict[str, type[Policy]] = {
    "ar": Plain,
    "sd": Sequential,
    "pearl": Pearl,
    "dsi": Distributed,
    "ssd": Branching,
    "bvsp": BranchVerifying,
}

EAGER = frozenset({"dsi", "bvsp"})
"""Policies that have several verifiers at work for one request."""
