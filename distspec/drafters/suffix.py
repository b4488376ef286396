"""Drafts from a suffix automaton: what most often followed the longest earlier occurrences of a text's end.

Knows the text of each request and, if asked to, the outputs of requests that ended. Does not know a model or a device.

SAM decoding (arXiv 2411.10666) matches a text against itself with a suffix automaton; SuffixDecoding (arXiv 2411.04975)
grows trees by how often a continuation was seen, as long as the match is. Probabilities are those of PPM (Cleary and
Witten, 1984): a context gives its followers their shares, and the rest to the next shorter context.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from distspec.config import Suffix
from distspec.drafters.automaton import Automaton, Cursor, Library
from distspec.drafters.base import DraftRow, Proposal, check_row, limited
from distspec.drafters.sprout import Sprout
from distspec.drafters.text import Text
from distspec.protocol.values import ROOT, Shape

_CAUTION = 2
"""What a new token weighs against one that followed before. So guesses come true as often as they promise, within 0.08,
on Python in tokens of SmolLM2; on prose, short matches promise too much. With 1 they promised up to twice as much.
"""


@dataclass(slots=True)
class _Followed:
    """A text, its automaton, and how long it was when it was first seen: what comes after is output."""

    automaton: Automaton
    text: Text = field(default_factory=Text)
    prompt: int | None = None


class SuffixDrafter:
    """Host only: microseconds per token of the text, and per guess. max_model_len: of the target.

    Length adapts: a path ends where the confidence in all of it falls below options.min_prob. Below a match of n tokens
    that was seen once before, k tokens have a confidence of n (n + 1) / ((n + k) (n + k + 1)), so that the draft is
    about n (min_prob ** -0.5 - 1) tokens long.
    """

    def __init__(self, options: Suffix, *, max_model_len: int) -> None:
        self._options = options
        self._max_model_len = max_model_len
        self._followed: dict[int, _Followed] = {}
        self._library = Library(options.max_match, options.max_shared_tokens) if options.share_outputs else None

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        for row in rows:
            known = self._followed.get(row.request)
            check_row(row, len(known.text.tokens) if known else 0)
        return [self._propose(row) for row in rows]

    def forget(self, request: int) -> None:
        followed = self._followed.pop(request, None)
        if followed is not None and self._library is not None:
            output = followed.text.tokens[followed.prompt :]
            if output:
                self._library.add(output)

    def check(self) -> None:
        """There are no pages."""

    def _propose(self, row: DraftRow) -> Proposal:
        followed = self._followed.get(row.request)
        if followed is None:
            followed = self._followed[row.request] = _Followed(Automaton(self._options.max_match))
        text = followed.text
        known = len(text.tokens)
        same = text.follow(row.keep, row.tokens)
        if same < known:  # an automaton cannot shrink
            followed.automaton, same = Automaton(self._options.max_match), 0
        followed.automaton.extend(text.tokens[same:])
        if followed.prompt is None:
            followed.prompt = len(text.tokens)
        ends = [(followed.automaton, followed.automaton.end)]
        if self._library is not None:
            suffix = text.tokens[-self._options.max_match :]
            ends += [(shared, shared.walk(suffix)) for shared in self._library.automata]
        shape = limited(row.shape, self._max_model_len - len(text.tokens))
        _Growth(text.tree, ends, math.log(self._options.min_prob)).grow(shape, row.params.stop_token_ids)
        return text.tree.proposal()


Matches = Sequence[tuple[Automaton, Cursor]]


class _Growth:
    """One turn of a tree: nodes with the matches of the paths that lead to them, and log-probabilities of these.

    floor: of the least probable path that is drafted.
    """

    def __init__(self, tree: Sprout, ends: Matches, floor: float) -> None:
        self._tree = tree
        self._floor = floor
        self._known: dict[int, tuple[Matches, float]] = {ROOT: (ends, 0.0)}

    def grow(self, shape: Shape, stop: Collection[int]) -> None:
        """As the shape says. A node without a guess stays open: as the end of the text it may be worth one."""
        every = structs.replace(shape, width=shape.nodes)
        barren: set[int] = set()
        for _ in range(shape.steps):
            grown = 0
            for node in self._tree.frontier(every):
                if node not in barren and grown < shape.width:
                    found = self._guesses(node, shape.topk)
                    if found:
                        self._tree.expand(node, found, shape, stop)
                        grown += 1
                    else:
                        barren.add(node)
            if not grown:
                return

    def _guesses(self, node: int, most: int) -> list[tuple[int, float]]:
        matches, value = self._path(node)
        return guesses(matches, most, least=self._floor - value)

    def _path(self, node: int) -> tuple[Matches, float]:
        known = self._known.get(node)
        if known is None:
            matches, value = self._path(self._tree.parent(node))
            token = self._tree.token(node)
            matches = [(automaton, automaton.step(cursor, token)) for automaton, cursor in matches]
            known = self._known[node] = matches, value + self._tree.score(node)
        return known


def guesses(
    matches: Iterable[tuple[Automaton, Cursor]], most: int, least: float = -math.inf
) -> list[tuple[int, float]]:
    """At most so many tokens that may follow, with log-probabilities that add up to at most 1, best first; none whose
    log-probability is below `least`.

    Matches are asked longest first, each for what followed it and then what followed its suffixes. Where a match of
    n tokens was followed m times, by d different tokens, a new one follows with probability 2 d / (2 d + m n): PPM's
    method C (Moffat, 1990), in which every matched token counts like an occurrence, and a new token twice.
    """
    found: dict[int, float] = {}
    left = 0.0  # log-probability of a token that is not found yet
    for automaton, cursor in sorted(matches, key=lambda match: -match[1].length):
        for context in automaton.shorter(cursor):
            if len(found) == most or left < least:
                break
            followers = automaton.followers(context)
            if found:
                followers = [follower for follower in followers if follower.token not in found]
            if followers:
                seen = sum(follower.times for follower in followers)
                new = _CAUTION * len(followers)
                known = seen * context.length
                for token, times, _ in heapq.nlargest(most - len(found), followers, key=lambda f: f[1:]):
                    found[token] = left + math.log(known / (new + known) * times / seen)
                left += math.log(new / (new + known))
    likely = [guess for guess in found.items() if guess[1] >= least]
    return sorted(likely, key=lambda guess: -guess[1])
