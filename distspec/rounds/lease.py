"""Rounds under a lease: what to draft, and how far the target's outcomes follow it.

Knows proposals, outcomes and the rule that ends a stream. Does not know pages, messages that wait, or
other work of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from distspec.drafters.base import Drafter, DraftRow, Proposal
from distspec.drafters.sprout import worth
from distspec.kv.sequence import Sequence as Books
from distspec.protocol.messages import ROOT, Node, SamplingParams, Shape, finish_reason
from distspec.rounds.held import Held


@dataclass(frozen=True, slots=True)
class Walk:
    """tokens: emitted by a round, at least one. path: the nodes among them, oldest first. ended: why, if it did."""

    tokens: tuple[int, ...]
    path: tuple[int, ...]
    ended: str | None


def accept(nodes: Iterable[Node], outcomes: Iterable[tuple[int, int]], params: SamplingParams, emitted: int) -> Walk:
    """Follow the outcomes from the root for as long as a child carries them, or until the stream ends.

    nodes: the round's tree, any order. outcomes: (node id or ROOT, token), complete. emitted: output tokens before.
    """
    children: dict[tuple[int, int], int] = {}
    for node in nodes:
        children.setdefault((node.parent, node.token), node.id)
    drawn = dict(outcomes)
    tokens: list[int] = []
    path: list[int] = []
    at: int | None = ROOT
    ended = None
    while at is not None and ended is None:
        token = drawn[at]
        tokens.append(token)
        ended = finish_reason(params, emitted + len(tokens), token)
        at = children.get((at, token))
        if at is not None:
            path.append(at)
    return Walk(tuple(tokens), tuple(path), ended)


def draft(drafter: Drafter, rounds: Sequence[tuple[Held, Books]]) -> None:
    """Give every round its nodes, but none that could not be emitted before the stream is full.

    The one token left of a round's work is the root of the tree. Of what the drafter grows, the likeliest
    `Lease.nodes` are judged.
    """
    rows, takers = [], []
    for held, sequence in rounds:
        assert held.work is not None
        held.work.drafted = True
        depth = held.params.max_tokens - held.emitted - 1
        if held.shape is not None and depth > 0:
            tokens = (*sequence.tokens[held.told :], held.work.tokens[0])
            shape = structs.replace(held.shape, depth=min(held.shape.depth, depth))
            rows.append(DraftRow(held.request, held.told, tokens, shape, held.params))
            takers.append(held)
    if not rows:
        return
    for held, row, proposal in zip(takers, rows, drafter.propose(rows), strict=True):
        assert held.work is not None
        held.told = row.keep + len(row.tokens)
        held.work.nodes.extend(_nodes(best(proposal, held.most, row.shape)))


def best(proposal: Proposal, most: int, shape: Shape) -> Proposal:
    """The likeliest nodes of a proposal, compared as the shape says; parents come along, since no node is likelier
    than what it hangs on. None deeper than shape.depth."""
    value: list[float] = []
    depth: list[int] = []
    seen: Counter[int] = Counter()
    for i, parent in enumerate(proposal.parents):
        score = proposal.scores[i] if proposal.scores else None
        above = (value[parent], depth[parent]) if parent >= 0 else (0.0, 0)
        value.append(above[0] + worth(seen[parent], score, shape.odds))
        depth.append(above[1] + 1)
        seen[parent] += 1
    able = [i for i in range(len(value)) if depth[i] <= shape.depth]
    taken = sorted(sorted(able, key=lambda i: -value[i])[:most])
    index = {ROOT: ROOT} | {i: at for at, i in enumerate(taken)}
    return Proposal(
        tokens=tuple(proposal.tokens[i] for i in taken),
        parents=tuple(index[proposal.parents[i]] for i in taken),
        scores=tuple(proposal.scores[i] for i in taken) if proposal.scores else (),
    )


def _nodes(proposal: Proposal) -> list[Node]:
    """Nodes are known by their index in the proposal: all of them are gone when the round is over."""
    pairs = zip(proposal.tokens, proposal.parents, strict=True)
    return [Node(id=i, parent=parent, token=token) for i, (token, parent) in enumerate(pairs)]
