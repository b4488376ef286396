"""Prompt lookup: what followed the latest earlier occurrence of the text's own suffix.

Knows the tokens of each request's text. Does not know a model, a device, or how tokens are drawn.

Longer suffixes are tried first, from max_n down to min_n tokens. Prompt Lookup Decoding (A. Saxena, 2023);
also what `ngram` means in vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from distspec.config import Ngram
from distspec.drafters.base import DraftRow, Proposal, check_row, common, limited
from distspec.drafters.sprout import Sprout

_SEEN = 16
"""Occurrences of a suffix that are looked at for different continuations."""


class NgramDrafter:
    """One index of n-grams per request, kept up to date token by token, so a guess costs a few look-ups."""

    def __init__(self, options: Ngram, *, max_model_len: int) -> None:
        self._sizes = range(options.max_n, options.min_n - 1, -1)
        self._max_model_len = max_model_len
        self._texts: dict[int, _Text] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        for row in rows:
            known = self._texts.get(row.request)
            check_row(row, len(known.tokens) if known else 0)
        return [self._propose(row) for row in rows]

    def forget(self, request: int) -> None:
        self._texts.pop(request, None)

    def check(self) -> None:
        """There are no pages."""

    def _propose(self, row: DraftRow) -> Proposal:
        text = self._texts.get(row.request)
        if text is None:
            text = self._texts[row.request] = _Text(self._sizes)
        text.follow(row.keep, row.tokens)
        shape = limited(row.shape, self._max_model_len - len(text.tokens))
        for _ in range(shape.steps):
            for node in text.tree.frontier(shape):
                text.tree.expand(node, text.guesses(node, shape.topk), shape, row.params.stop_token_ids)
        return text.tree.proposal()


class _Text:
    """A text, the tree below it and, for each n-gram of the text, the ends of all occurrences in ascending order.

    Occurrences form stacks because a sequence is only ever cut or extended at its end: undoing a token pops
    what adding it pushed.
    """

    def __init__(self, sizes: range) -> None:
        self.tokens: list[int] = []
        self.tree = Sprout()
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def follow(self, keep: int, tokens: Sequence[int]) -> None:
        """Cut to `keep` tokens, append, and keep of the tree what the text followed."""
        same = keep + common(self.tokens[keep:], tokens)
        if same < len(self.tokens):
            self.tree.clear()
        self.tree.advance(tokens[len(self.tokens) - keep :])
        self.cut(same)
        self.extend(tokens[same - keep :])

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for size in self._sizes:
                if size <= end:
                    self._ends.setdefault(tuple(self.tokens[end - size :]), []).append(end)

    def cut(self, length: int) -> None:
        while len(self.tokens) > length:
            end = len(self.tokens)
            for size in self._sizes:
                if size <= end:
                    gram = tuple(self.tokens[end - size :])
                    ends = self._ends[gram]
                    ends.pop()
                    if not ends:
                        del self._ends[gram]
            self.tokens.pop()

    def guesses(self, node: int, most: int) -> list[tuple[int, float]]:
        """What followed earlier occurrences of the longest suffix of the path to `node`, the latest first; then of
        shorter ones. A longer match is trusted more."""
        length = len(self.tokens)
        self.extend([self.tree.token(above) for above in self.tree.path(node)])
        found: dict[int, float] = {}
        end = len(self.tokens)
        for size in self._sizes:
            if size < end and len(found) < most:
                ends = self._ends[tuple(self.tokens[end - size :])]
                for earlier in ends[-2 : -2 - _SEEN : -1]:  # the last one is the suffix itself
                    found.setdefault(self.tokens[earlier], math.log1p(-(0.5**size)))
        self.cut(length)
        return list(found.items())[:most]
