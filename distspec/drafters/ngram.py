"""Prompt lookup: what followed the latest earlier occurrence of the sequence's own suffix.

Knows the tokens of each request's sequence. Does not know a model, a device, or how tokens are drawn.

Longer suffixes are tried first, from max_n down to min_n tokens. Prompt Lookup Decoding (A. Saxena, 2023);
also what `ngram` means in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

from distspec.config import Ngram
from distspec.drafters.base import DraftRow, Proposal, check_row, until_stop


class NgramDrafter:
    """One index of n-grams per request, kept up to date token by token, so a proposal costs a few look-ups."""

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
        text.cut(row.keep)
        text.extend(row.tokens)
        count = min(row.count, self._max_model_len - len(text.tokens))
        return Proposal.chain(until_stop(text.continuation(count), row.params))


class _Text:
    """A sequence and, for each of its n-grams, the ends of all occurrences in ascending order.

    Occurrences form stacks because a sequence is only ever cut or extended at its end: undoing a token pops
    what adding it pushed.
    """

    def __init__(self, sizes: range) -> None:
        self.tokens: list[int] = []
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], list[int]] = {}

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

    def continuation(self, count: int) -> list[int]:
        """At most `count` tokens that followed the latest earlier occurrence of the longest suffix."""
        length = len(self.tokens)
        for size in self._sizes:
            if size < length and count > 0:
                ends = self._ends[tuple(self.tokens[length - size :])]
                if len(ends) > 1:  # the last one is the suffix itself
                    return self.tokens[ends[-2] : ends[-2] + count]
        return []
