"""Policies: which nodes of a tree are judged where, and which leaf the drafter grows next.

Pure: a policy sees one request's tree and what is in flight, and returns wishes. It does not know messages,
KV, credits or time; the coordinator turns a submission into whatever the verifier still lacks of the path.

`sd` is speculative decoding as in arXiv 2211.17192 (draft k, verify k); `dsi` is distributed speculative
inference (arXiv 2405.14105): the drafter never waits, and every `lookahead` tokens go to the next free verifier.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from distspec.speculation.tree import Tree


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy may look at.

    in_flight: ids of nodes (the root too) whose verdict is on its way. free: verifiers that hold the
    request and have nothing of it in flight, the preferred first. total: verifiers in use, busy ones too.
    drafting: a draft is on its way. dry: the drafter has nothing to add to the present tip.
    width: nodes to draft in a round. depth: most live nodes below the root. lookahead: see `dsi`.
    """

    tree: Tree
    in_flight: Collection[int]
    free: Sequence[str]
    total: int
    drafting: bool
    dry: bool
    width: int
    depth: int
    lookahead: int


@dataclass(frozen=True, slots=True)
class Submission:
    """Judge these nodes there. The root is judged with them, since it is on every path."""

    verifier: str
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Growth:
    """Draft `count` nodes below `leaf`."""

    leaf: int
    count: int


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
    """`sd`: draft a chain of `width`, judge it with the root by one verifier, and only then draft again."""

    def submit(self, now: Situation) -> list[Submission]:
        waits_for_draft = now.drafting or self.grow(now) is not None
        if now.in_flight or waits_for_draft or not now.free:
            return []
        return [Submission(now.free[0], tuple(now.tree.chain()))]

    def grow(self, now: Situation) -> Growth | None:
        if now.in_flight or now.drafting or now.dry or len(now.tree) or not now.width:
            return None
        return Growth(now.tree.root, min(now.width, now.depth))


class Distributed:
    """`dsi`: the drafter runs ahead without waiting; the root alone goes out at once, so that a drafter
    which is always wrong costs nothing, and every `lookahead` drafted nodes go to the next free verifier."""

    def submit(self, now: Situation) -> list[Submission]:
        tree, free, out = now.tree, list(now.free), []
        waiting = [node for node in tree.chain() if node not in now.in_flight and tree.nodes[node].outcome is None]
        if free and tree.root not in now.in_flight:
            out.append(Submission(free.pop(0), tuple(waiting)))
            waiting = []
        while free and waiting and (len(waiting) >= now.lookahead or self._is_stuck(now)):
            out.append(Submission(free.pop(0), tuple(waiting[: now.lookahead])))
            waiting = waiting[now.lookahead :]
        return out

    def grow(self, now: Situation) -> Growth | None:
        room = now.depth - len(now.tree)
        if now.drafting or now.dry or room < 1:
            return None
        return Growth(now.tree.tip(), min(now.lookahead, room))

    def _is_stuck(self, now: Situation) -> bool:
        return not now.drafting and self.grow(now) is None


POLICIES: dict[str, type[Policy]] = {"ar": Plain, "sd": Sequential, "dsi": Distributed}


def depth(policy: str, width: int, lookahead: int, verifiers: int) -> int:
    """Live nodes a policy wants below the root: what `dsi` drafts while every verifier is busy once."""
    return lookahead * (verifiers + 1) if policy == "dsi" else width
