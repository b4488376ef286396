"""Where the output of one request stands in its grammar, and what may follow.

Knows one compiled grammar and tokens. Does not know slots, nodes, steps, or who commits tokens.

All that it says is a function of the output alone: after whatever happened to a request (a drop, a hand-over,
another life), it is told the output there is, goes back to what that has in common with the last one, and on from
there. Going back and on costs microseconds a token (xgrammar's matcher rolls back without limit).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar


class Matcher:
    """Where the grammar allows nothing, after its end or behind a text that it refuses, only stop ids may follow.

    begin: where in a text the output begins, which is all that the grammar sees of it.
    """

    def __init__(self, compiled: CompiledGrammar, begin: int = 0) -> None:
        import xgrammar

        self._begin = begin
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._stop_ids: list[int] = compiled.tokenizer_info.stop_token_ids
        self._taken: list[int] = []  # what the grammar has accepted: the output, then a path below it
        self._length = 0  # tokens of the output among these
        self._spelled: tuple[list[int], list[int]] = [], []  # a path from the beginning, and what was forced behind it
        self._is_lost = False  # the output goes on with a token that the grammar refuses

    def follow(self, text: Sequence[int]) -> None:
        """Go to the end of a text."""
        output = text[self._begin :]
        self._back_to(_common(self._taken, output))
        self._is_lost = not self._accept(output[len(self._taken) :])
        self._length = len(self._taken)

    def fill(self, paths: Sequence[Sequence[int]], bits: Tensor) -> None:
        """Write into bits[i] what may come after the text and then paths[i].

        bits: int32 [paths, ceil(vocab / 32)] on the CPU; bit t % 32 of word t // 32 is set: token t may come. The
        paths are walked in the order of their tokens, which is depth first, so what they share is accepted once.
        """
        for path, row in sorted((tuple(path), row) for row, path in enumerate(paths)):
            if self._reaches(path):
                self._matcher.fill_next_token_bitmask(bits, row)
            else:
                _fill_with(bits[row], self._stop_ids)
        self._back_to(self._length)

    def allowed(self, path: Sequence[int]) -> int:
        """How many of the first tokens of a path the grammar allows after the text."""
        if self._is_lost:
            return 0
        self._reaches(path)
        count = len(self._taken) - self._length
        self._back_to(self._length)
        return count

    def forced(self, path: Sequence[int] = ()) -> list[int]:
        """The longest tokens that spell what must come after the text and this path; empty where that is open.

        A first one that is the only one allowed is a draft that cannot fail. The rest are likely: a model may spell
        the same text in other pieces (jump-forward, L. Zheng et al., arXiv 2312.07104).
        """
        tokens = self._ahead() if self._reaches(path) else []
        self._back_to(self._length)
        return tokens

    def _ahead(self) -> list[int]:
        """What is forced here. A text of many thousands is spelled once, while it is followed: that takes a millisecond
        for each thousand."""
        begin, forced = self._spelled
        since = self._taken[len(begin) :]
        if len(since) < len(forced) and since == forced[: len(since)] and self._taken[: len(begin)] == begin:
            return forced[len(since) :]
        found: list[int] = self._matcher.find_jump_forward_tokens()
        self._spelled = list(self._taken), found
        return found[:]

    def _reaches(self, path: Sequence[int]) -> bool:
        """Go to the end of the text and this path, as far as the grammar allows; whether something may follow."""
        if self._is_lost:
            return False
        self._back_to(self._length + _common(self._taken[self._length :], path))
        done = len(self._taken) - self._length
        return self._accept(path[done:]) and not self._matcher.is_terminated()

    def _accept(self, tokens: Sequence[int]) -> bool:
        """Go on by these tokens, up to the first that is refused; False if there was one."""
        for token in tokens:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                return False
            self._taken.append(token)
        return True

    def _back_to(self, length: int) -> None:
        gone = len(self._taken) - length
        if gone:
            self._matcher.rollback(gone)
            del self._taken[length:]


def _common(one: list[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    if one == list(other[: len(one)]):  # nearly always, and quick
        return len(one)
    return next(i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b)


def _fill_with(bits: Tensor, ids: Sequence[int]) -> None:
    bits.zero_()
    words = bits.numpy().view(np.uint32)  # the topmost bit of an int32 is its sign
    for id in ids:
        words[id // 32] |= np.uint32(1 << id % 32)
