"""A drafter that lets another one work and then says something else: guesses that are right as often as one says.

For benchmarks on random weights, see distspec.synthetic. Knows texts and shapes. Does not know whose time it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from distspec import synthetic
from distspec.drafters.base import Drafter, DraftRow, Lender, Proposal, check_row, lender_of, limited, pools_of, taps_of
from distspec.drafters.text import Text
from distspec.kv.pool import KVPool
from distspec.protocol.odds import share
from distspec.protocol.values import ROOT


class SyntheticDrafter:
    """odds[r]: how often the r-th guess is right.

    The other drafter is told every text and asked for every shape, so its forwards run in full; but it is as good as
    always wrong, and computes what was accepted once more instead of keeping it.
    """

    def __init__(self, drafter: Drafter, odds: Sequence[float], *, vocab_size: int, max_model_len: int) -> None:
        self.taps = taps_of(drafter)
        self._drafter = drafter
        self._odds = tuple(odds)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._texts: dict[int, Text] = {}

    @property
    def pool(self) -> KVPool | None:
        return next(iter(pools_of(self._drafter)), None)

    @property
    def lender(self) -> Lender | None:
        """The other drafter's: whoever borrows from it makes guesses up as well."""
        return lender_of(self._drafter)

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        for row in rows:
            known = self._texts.get(row.request)
            check_row(row, len(known.tokens) if known else 0)
        others = self._drafter.propose(rows)
        return [self._propose(row, other.left) for row, other in zip(rows, others, strict=True)]

    def forget(self, request: int) -> None:
        self._texts.pop(request, None)
        self._drafter.forget(request)

    def check(self) -> None:
        self._drafter.check()

    def _propose(self, row: DraftRow, left: int) -> Proposal:
        text = self._texts.setdefault(row.request, Text())
        text.follow(row.keep, row.tokens)
        shape = limited(row.shape, self._max_model_len - len(text.tokens))
        for _ in range(shape.steps - left if text.tokens else 0):
            for node in text.tree.frontier(shape):
                guesses = self._guesses(row, text, node, shape.topk)
                text.tree.expand(node, guesses, shape, row.params.stop_token_ids)
        return Proposal((), (), left=left) if left else text.tree.proposal()

    def _guesses(self, row: DraftRow, text: Text, node: int, most: int) -> list[tuple[int, float]]:
        """With the confidence of a drafter that knows how often it is right."""
        params, position = row.params, len(text.tokens) + len(text.tree.path(node))
        last = text.tokens[-1] if node == ROOT else text.tree.token(node)
        found = synthetic.guesses(params.seed, params.choice, position, last, self._vocab_size, self._odds, most)
        return [(token, math.log(max(share(rank, self._odds), 1e-9))) for rank, token in enumerate(found)]
