"""A drafter whose drafts keep to the constraints of their requests, and hold what these force.

Knows texts, grammars and trees of guesses. Does not know where guesses come from, or who judges them.

What a grammar refuses can never be right, so it is cut. Where it leaves one way on, that is drafted, whatever the
drafter thinks: a single token that may come is a draft that cannot fail, a longer text is likely to come in its longest
pieces (jump-forward, L. Zheng et al., arXiv 2312.07104). Drafts that the drafter made below remain there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from distspec.constraints import Grammars, Hint, Matcher
from distspec.drafters.base import Drafter, DraftRow, Lender, Proposal, lender_of, pools_of, taps_of
from distspec.kv.pool import KVPool
from distspec.protocol.values import ROOT, SamplingParams, Shape

_FORCED = -0.05
"""Log-probability that what must come next comes in just these pieces."""


@dataclass(slots=True)
class _Text:
    hint: Hint
    tokens: list[int] = field(default_factory=list)


class Guided:
    """The same as `inner` where nothing is constrained, or the grammar is not ready yet; or where drafts are weighed by
    what they were drawn from (sampling.rejection), since a chain must not be cut for what was drawn."""

    def __init__(self, inner: Drafter, grammars: Grammars) -> None:
        self._inner = inner
        self._grammars = grammars
        self._texts: dict[int, _Text] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        return taps_of(self._inner)

    @property
    def pool(self) -> KVPool | None:
        return next(iter(pools_of(self._inner)), None)

    @property
    def lender(self) -> Lender | None:
        return lender_of(self._inner)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        proposals = self._inner.propose(rows)
        matchers = [self._matcher(row) if row.params.constraint is not None else None for row in rows]
        return [
            guided(proposal, matcher, row.shape, row.params)
            if matcher is not None and not proposal.laws and not proposal.left
            else proposal
            for proposal, matcher, row in zip(proposals, matchers, rows, strict=True)
        ]

    def forget(self, request: int) -> None:
        self._texts.pop(request, None)
        self._inner.forget(request)

    def check(self) -> None:
        self._inner.check()

    def _matcher(self, row: DraftRow) -> Matcher | None:
        """At the end of the row's text; None if its grammar is not ready, or never will be."""
        text = self._texts.get(row.request)
        if text is None:
            hint = Hint.of(row.params, self._grammars)
            assert hint is not None
            text = self._texts[row.request] = _Text(hint)
        text.tokens[row.keep :] = row.tokens
        return text.hint.at(text.tokens)


def guided(proposal: Proposal, matcher: Matcher, shape: Shape, params: SamplingParams) -> Proposal:
    """What of a proposal the grammar allows, and what it forces where the proposal ends; no larger than the shape says.

    matcher: at the end of the text.
    """
    tree = _Tree(bool(proposal.scores) or not proposal.tokens)
    kept: dict[int, int] = {ROOT: ROOT}
    for i, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
        if parent in kept and matcher.allowed([*tree.path(kept[parent]), token]) == tree.depth(kept[parent]) + 1:
            kept[i] = tree.add(kept[parent], token, proposal.scores[i] if proposal.scores else 0.0)
    for leaf in [node for node in (ROOT, *range(len(tree.tokens))) if node not in tree.parents]:
        _extend(tree, leaf, matcher.forced(tree.path(leaf)), shape, params)
    return tree.proposal()


def _extend(tree: _Tree, leaf: int, forced: Iterable[int], shape: Shape, params: SamplingParams) -> None:
    for token in forced:
        ends = leaf != ROOT and tree.tokens[leaf] in params.stop_token_ids
        if ends or len(tree.tokens) >= shape.nodes or tree.depth(leaf) >= shape.depth:
            return
        leaf = tree.add(leaf, token, _FORCED)


class _Tree:
    """A proposal that is being made; nodes by their index."""

    def __init__(self, is_scored: bool) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._scores: list[float] = []
        self._is_scored = is_scored

    def add(self, parent: int, token: int, score: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self._scores.append(score)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """Tokens from the end of the text down to the node."""
        path = []
        while node != ROOT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def depth(self, node: int) -> int:
        return len(self.path(node))

    def proposal(self) -> Proposal:
        return Proposal(tuple(self.tokens), tuple(self.parents), tuple(self._scores) if self._is_scored else ())
