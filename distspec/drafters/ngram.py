"""Prompt lookup: what followed the latest earlier occurrence of the text's own suffix.

Knows the tokens of each request's text, and the tree below it. Does not know a model, or how tokens are drawn.

Longer suffixes are tried first, from max_n down to min_n tokens. Prompt Lookup Decoding (A. Saxena, 2023);
also what `ngram` means in vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from distspec.config import Ngram
from distspec.drafters.base import DraftRow, Loan, Proposal, check_row, limited
from distspec.drafters.matchers import DeviceMatcher, Edit, HostMatcher, Matcher, Query, Run
from distspec.drafters.ngram_chains import NgramChains
from distspec.drafters.sprout import Sprout
from distspec.drafters.text import Text
from distspec.engine import MakeChains
from distspec.protocol.values import Shape


class NgramDrafter:
    """max_model_len: of the target. device: where texts are matched, all rows at once; on the CPU, or None, by
    dictionaries, which are faster (one core, texts of 4k tokens: 11 us against 306 for a row, 0.8 ms against 6.7 for
    64)."""

    def __init__(self, options: Ngram, *, max_model_len: int, device: torch.device | None = None) -> None:
        self._options = options
        self._max_model_len = max_model_len
        self._on_device = device is not None and device.type != "cpu"
        self._texts: dict[int, Text] = {}
        self._matcher: Matcher = (
            HostMatcher(max_n=options.max_n, min_n=options.min_n)
            if device is None or device.type == "cpu"
            else DeviceMatcher(max_n=options.max_n, min_n=options.min_n, device=device)
        )

    @property
    def lender(self) -> NgramDrafter | None:
        """Where it matches on the device, it drafts inside rounds there: see Lender."""
        return self if self._on_device else None

    @property
    def engine(self) -> MakeChains:
        return partial(NgramChains, self._options)

    def lend(self, rows: Sequence[DraftRow]) -> list[Loan | None]:
        for row in rows:
            known = self._texts.get(row.request)
            check_row(row, len(known.tokens) if known else 0)
        self._matcher.write([self._follow(row) for row in rows])
        texts = [self._texts[row.request] for row in rows]
        for text in texts:
            text.tree.clear()
        return [_Loan(self, row.request, text, len(text.tokens)) for row, text in zip(rows, texts, strict=True)]

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        for row in rows:
            known = self._texts.get(row.request)
            check_row(row, len(known.tokens) if known else 0)
        self._matcher.write([self._follow(row) for row in rows])
        growths = [self._growth(row) for row in rows]
        while asked := [(growth, node) for growth in growths for node in growth.grow()]:
            queries = [Query(growth.request, growth.path(node)) for growth, node in asked]
            topk, steps = max(g.shape.topk for g, _ in asked), max(g.steps for g, _ in asked)
            for (growth, node), runs in zip(asked, self._matcher.lookup(queries, topk, steps), strict=True):
                growth.runs[node] = runs
        return [self._texts[row.request].tree.proposal() for row in rows]

    def forget(self, request: int) -> None:
        self._texts.pop(request, None)
        self._matcher.forget(request)

    def check(self) -> None:
        """There are no pages."""

    def _follow(self, row: DraftRow) -> Edit:
        text = self._texts.setdefault(row.request, Text())
        same = text.follow(row.keep, row.tokens)
        return Edit(row.request, same, text.tokens[same:])

    def _growth(self, row: DraftRow) -> _Growth:
        text = self._texts[row.request]
        shape = limited(row.shape, self._max_model_len - len(text.tokens))
        return _Growth(row.request, text.tree, shape, row.params.stop_token_ids, shape.steps)


@dataclass(slots=True)
class _Loan:
    """See Loan. Texts need no pages, so there is no slot. known: tokens of the text that the matcher has."""

    _drafter: NgramDrafter
    _request: int
    _text: Text
    _known: int
    slot: None = None

    def hold(self, end: int) -> bool:
        return end <= self._drafter._max_model_len

    def follow(self, tokens: Sequence[int], end: int) -> None:
        self._text.tokens += tokens

    def close(self) -> None:
        if self._drafter._texts.get(self._request) is self._text:
            self._drafter._matcher.write([Edit(self._request, self._known, self._text.tokens[self._known :])])


@dataclass(slots=True)
class _Growth:
    """One turn of a tree. runs: what may follow a node, best first; known for those that were looked up, and for
    those that came with a run, whose own rest it is. steps: that are left."""

    request: int
    tree: Sprout
    shape: Shape
    stop: Collection[int]
    steps: int
    runs: dict[int, list[Run]] = field(default_factory=dict)

    def grow(self) -> list[int]:
        """As far as runs are known; the nodes that have to be looked up first."""
        while self.steps:
            frontier = self.tree.frontier(self.shape)
            unknown = [node for node in frontier if node not in self.runs]
            if unknown:
                return unknown
            for node in frontier:
                self._expand(node)
            self.steps = self.steps - 1 if frontier else 0
        return []

    def path(self, node: int) -> list[int]:
        """Tokens from the end of the text down to the node."""
        return [self.tree.token(above) for above in self.tree.path(node)]

    def _expand(self, node: int) -> None:
        runs = self.runs.pop(node)
        guesses = list(zip((run.tokens[0] for run in runs), self._scores(runs), strict=True))
        for child, run in zip(self.tree.expand(node, guesses, self.shape, self.stop), runs, strict=False):
            if len(run.tokens) > 1:
                self.runs[child] = [Run(run.tokens[1:], run.size + 1)]

    def _scores(self, runs: Sequence[Run]) -> list[float]:
        """Log-probabilities: n matched tokens are right n times of n + 2, which is what source code and Markdown show;
        what is left is the next run's."""
        left, scores = 1.0, []
        for run in runs:
            scores.append(math.log(left * run.size / (run.size + 2)))
            left *= 2 / (run.size + 2)
        return scores
