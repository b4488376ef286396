"""A suffix automaton of a text that grows: which strings it contains, how often, and what followed them.

Knows tokens and occurrences. Does not know requests, drafts, or how much an occurrence is worth.

Every state stands for the strings of the text that end at the same places; a state's link leads to the longest
suffix of these that ends at more places (Blumer et al., "The smallest automaton recognizing the subwords of a text",
1985). It is extended token by token in amortised constant time. Occurrences are counted along the links of each new
token, which is bounded because only strings of up to `reach` tokens are counted. A speculated path below the text is
matched by walking, never inserted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

BREAK = -1
"""Between two texts of one automaton: no string of tokens runs across it."""

_ROOT = 0  # the empty string
_NONE = -1


class Cursor(NamedTuple):
    """A match: the last `length` tokens that were walked are a string of `state`. Void once the text grows."""

    state: int
    length: int


class Follower(NamedTuple):
    """A token that followed a string: how often, and where the text stood after it the last time."""

    token: int
    times: int
    latest: int


START = Cursor(_ROOT, 0)
"""Nothing matched."""


class Automaton:
    """max_match: longest match in tokens; memory and time do not depend on it, but in texts that repeat themselves a
    token costs up to so many steps."""

    def __init__(self, max_match: int) -> None:
        self._max_match = max_match
        self._reach = max_match + 1  # a match and its follower
        self._next: list[dict[int, int]] = [{}]
        self._link = [_NONE]
        self._length = [0]  # of a state's longest string
        self._count = [0]  # exact for states with a string of up to `reach` tokens
        self._latest = [0]
        self._last = _ROOT  # the state of the whole text
        self._end = START

    def __len__(self) -> int:
        """Tokens of the text."""
        return self._length[self._last]

    @property
    def end(self) -> Cursor:
        """The longest suffix of the text that occurs earlier in it, too."""
        return self._shortened(self._end)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._append(token)

    def step(self, cursor: Cursor, token: int) -> Cursor:
        """Walk: the longest suffix of what was matched and `token` that the text has."""
        return self._shortened(self._step(cursor, token))

    def walk(self, tokens: Iterable[int], cursor: Cursor = START) -> Cursor:
        """As many steps."""
        for token in tokens:
            cursor = self._step(cursor, token)
        return self._shortened(cursor)

    def followers(self, cursor: Cursor) -> list[Follower]:
        """What followed the match, each token once, in no order."""
        count, latest = self._count, self._latest
        return [
            Follower(token, count[state], latest[state])
            for token, state in self._next[cursor.state].items()
            if token != BREAK
        ]

    def shorter(self, cursor: Cursor) -> Iterator[Cursor]:
        """The match, then its suffixes that occur in more places, down to one token."""
        while cursor.length:
            yield cursor
            state = self._link[cursor.state]
            cursor = Cursor(state, self._length[state])

    def _shortened(self, cursor: Cursor) -> Cursor:
        """A match that leaves room for its follower."""
        return self._bounded(cursor, self._max_match)

    def _bounded(self, cursor: Cursor, most: int) -> Cursor:
        """A match that is at most one token too long, cut to its last `most` tokens."""
        if cursor.length <= most:
            return cursor
        above = self._link[cursor.state]
        return Cursor(above if self._length[above] >= most else cursor.state, most)

    def _step(self, cursor: Cursor, token: int) -> Cursor:
        state, length = cursor
        while token not in self._next[state]:
            if state == _ROOT:
                return START
            state = self._link[state]
            length = self._length[state]
        return self._bounded(Cursor(self._next[state][token], length + 1), self._reach)

    def _append(self, token: int) -> None:
        state, length = self._step(self._end, token)  # of strings that were there before
        end = len(self) + 1
        fresh = self._new(end, {}, _ROOT, 1, end)
        above = self._last
        while above != _NONE and token not in self._next[above]:
            self._next[above][token] = fresh
            above = self._link[above]
        if above != _NONE:
            old = self._next[above][token]
            home = self._split(old, above, token)
            self._link[fresh] = home
            if state == old:  # the longer strings of a state that was split are no suffixes of the text
                state = home
        self._last, self._end = fresh, Cursor(state, length)
        while state != _ROOT:
            self._count[state] += 1
            self._latest[state] = end
            state = self._link[state]

    def _split(self, old: int, above: int, token: int) -> int:
        """The state whose longest string is that of `above` and `token`: `old`, or its shorter strings taken out."""
        length = self._length[above] + 1
        if self._length[old] == length:
            return old
        clone = self._new(length, dict(self._next[old]), self._link[old], self._count[old], self._latest[old])
        self._link[old] = clone
        while above != _NONE and self._next[above].get(token) == old:
            self._next[above][token] = clone
            above = self._link[above]
        return clone

    def _new(self, length: int, following: dict[int, int], link: int, count: int, latest: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._latest.append(latest)
        return len(self._length) - 1


class Library:
    """Automata of finished texts, bounded: the newest tokens, between half of max_tokens and all of it.

    An automaton cannot lose its oldest text, so there are two generations: when the young one has its half, the old
    one goes and a new one is begun.
    """

    def __init__(self, max_match: int, max_tokens: int) -> None:
        self._max_match = max_match
        self._half = max(1, max_tokens // 2)
        self._old = Automaton(max_match)
        self._young = Automaton(max_match)

    def __len__(self) -> int:
        """Tokens held, breaks counted."""
        return len(self._old) + len(self._young)

    @property
    def automata(self) -> tuple[Automaton, Automaton]:
        """The young generation and the old one."""
        return self._young, self._old

    def add(self, text: list[int]) -> None:
        """A finished text; of one that is longer than half the bound, its end."""
        text = text[max(0, len(text) + 1 - self._half) :]
        if len(self._young) + len(text) + 1 > self._half:
            self._old, self._young = self._young, Automaton(self._max_match)
        self._young.extend(text)
        self._young.extend([BREAK])
