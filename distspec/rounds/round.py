"""One round of a lease: what of a proposal is judged, and how far the target's outcomes follow it.

Knows proposals, outcomes and the rule that ends a stream. Does not know pages, messages that wait, or other work
of the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from distspec.drafters.base import Proposal
from distspec.drafters.sprout import worth
from distspec.engine import Engine, Segment
from distspec.protocol.values import ROOT, Node, SamplingParams, Shape, TokenLogprobs, finish_reason
from distspec.rounds.work import Work


@dataclass(frozen=True, slots=True)
class Ended:
    """tokens: emitted by a round, at least one. drafted, accepted: nodes judged, and kept. reason: why the stream
    ended, if it did. logprobs: of the tokens, where the slot asks for them."""

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    reason: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()


class Round(Work):
    """A round whose nodes form any tree; the first one computes what the Lease brought. laws: of its nodes, by their
    index; empty where drafts are not judged by what they were drawn from."""

    laws: tuple[Tensor, ...] = ()

    def hang(self, proposal: Proposal, most: int, shape: Shape) -> None:
        """Take the likeliest `most` nodes of a proposal to be judged.

        They are known by their index: all of them are gone when the round is over.
        """
        chosen = best(proposal, most, shape)
        pairs = zip(chosen.tokens, chosen.parents, strict=True)
        self.nodes.extend(Node(id=i, parent=parent, token=token) for i, (token, parent) in enumerate(pairs))
        self.laws = chosen.laws

    def segment(self, slot: int, rows: int) -> Segment:
        segment = super().segment(slot, rows)
        return replace(segment, laws=tuple(self.laws[node.id] for node in segment.nodes)) if self.laws else segment

    def end(self, engine: Engine, slot: int, params: SamplingParams, emitted: int) -> Ended:
        """Commit what was accepted, and free the rest. emitted: output tokens before this round."""
        walk = accept(self.judged, self.outcomes, params, emitted)
        dead = tuple(node.id for node in self.judged if node.id not in walk.path)
        engine.commit(slot, walk.path, dead)
        told = dict(zip((node for node, _ in self.outcomes), self.logprobs, strict=False))
        logprobs = tuple(told[node] for node in (ROOT, *walk.path)[: len(walk.tokens)] if node in told)
        return Ended(walk.tokens, len(self.judged), len(walk.path), walk.ended, logprobs)


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
        laws=tuple(proposal.laws[i] for i in taken) if proposal.laws else (),
    )
