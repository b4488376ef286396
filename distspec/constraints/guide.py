"""The constraint of one slot: its grammar once that is compiled, and masks by it.

Knows one request's constraint, where its output begins, and what its grammar may cost. Does not know slots, steps, or
who compiles.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from torch import Tensor

from distspec.constraints.grammars import Grammars
from distspec.constraints.matcher import Matcher
from distspec.errors import BadConstraint
from distspec.protocol.values import SamplingParams

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar


SLOW_S = 0.5
SLOW_PATH_S = 0.02
"""CPU seconds that the masks of one step, and of each path in it, may take; usual are 0.0001. In an ambiguous grammar a
token takes ever longer (J. Earley, CACM 1970), which no trial of it foretells, and others wait meanwhile."""


class Guide:
    """Nothing may be asked of it before it is ready. See sampling.editor.Masker."""

    def __init__(self, found: Future[CompiledGrammar], begin: int) -> None:
        self._found = found
        self._begin = begin
        self._matcher: Matcher | None = None

    @classmethod
    def of(cls, params: SamplingParams, grammars: Grammars | None) -> Guide | None:
        """None for a request without a constraint. grammars None: there is no tokenizer, so it can not be held to."""
        if params.constraint is None:
            return None
        if grammars is not None:
            return cls(grammars.find(params.constraint), params.prompt_tokens)
        return cls(_never("the model has no tokenizer here"), params.prompt_tokens)

    def is_ready(self) -> bool:
        """The grammar is compiled. Raises BadConstraint if it never will be, or takes too long to follow."""
        if not self._found.done():
            return False
        self._found.result()
        return True

    def fill(self, text: Sequence[int], paths: Sequence[Sequence[int]], bits: Tensor) -> None:
        """Write into bits[i] what may come after text and then paths[i]; see Matcher.fill."""
        began_s = time.thread_time()
        self.at(text).fill(paths, bits)
        if time.thread_time() - began_s > max(SLOW_S, SLOW_PATH_S * len(paths)):
            self._found = _never("ambiguous: it takes too long to follow")

    def at(self, text: Sequence[int]) -> Matcher:
        """The matcher at the end of a text, prompt included."""
        if self._matcher is None:
            self._matcher = Matcher(self._found.result(), self._begin)
        self._matcher.follow(text)
        return self._matcher


class Hint:
    """A guide of whoever may do without: before its grammar is ready, and where there will be none, all may follow."""

    def __init__(self, guide: Guide) -> None:
        self._guide = guide

    @classmethod
    def of(cls, params: SamplingParams, grammars: Grammars | None) -> Hint | None:
        """None for a request without a constraint."""
        guide = Guide.of(params, grammars)
        return cls(guide) if guide is not None else None

    def fill(self, text: Sequence[int], paths: Sequence[Sequence[int]], bits: Tensor) -> None:
        """As Guide.fill; bits come full, and stay so."""
        matcher = self.at(text)
        if matcher is not None:
            matcher.fill(paths, bits)

    def at(self, text: Sequence[int]) -> Matcher | None:
        """The matcher at the end of a text, if there is one."""
        try:
            return self._guide.at(text) if self._guide.is_ready() else None
        except BadConstraint:
            return None


def _never(why: str) -> Future[CompiledGrammar]:
    failed: Future[CompiledGrammar] = Future()
    failed.set_exception(BadConstraint(why))
    return failed
