"""How long the shortest text of each rule of a grammar is.

Knows how xgrammar prints the rules of a grammar. Does not know constraints, tokens or matchers.

Behind a rule without a text no output is whole. Worse, where one text alone may follow, as in `root ::= "a" root`,
xgrammar spells out what must come to its end, for ever or as good as that, and nothing can stop it. Whatever must come
is no longer than the shortest texts of the rules that are begun.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from math import inf

PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]')
"""Literals and classes of a rule, both of which Python reads as EBNF does."""
_STARRED = re.compile(rf"(?:{PARTS.pattern})\*?")
_ESCAPE = re.compile(r"\\(?:x..|u.{4}|U.{8}|.)")
_RULE = re.compile(r"^([\w.-]+) ::= ", re.MULTILINE)
_ATTRIBUTES = re.compile(r'^([\w.-]+)\[(?:"(?:\\.|[^"\\])*"|[^"\]])*\](?= ::= )', re.MULTILINE)
"""Of a rule, behind its name, as in `x[capture="a"] ::= "b"`; none makes its texts shorter."""
_DISPATCH = re.compile(r"\w*Dispatch\(")
"""Free text, with tags that are rules of their own."""
_CALL = re.compile(r"\w+\([^()]*\)")
"""An expression, or a set of tokens."""
_PIECE = re.compile(r"(?P<rule>[A-Za-z_][\w.-]*)(?:\{(?P<times>\d+),[^}]*\})?|(?P<size>\d+)")
_SPECIAL = re.compile(r"(?<!\\)([\[&~|])")
"""What Python may read in another way in a class one day, and warns of."""
_NONE = "!"


@dataclass(slots=True)
class _Sequence:
    """An alternative of a rule. size: of what is known of it, in characters; needs: how often which rule comes."""

    rule: str
    size: int
    needs: Counter[str]


def shortest(grammar: str) -> dict[str, float]:
    """Characters of the shortest text by rule, of a grammar as xgrammar prints it; infinite where there is none.

    Expressions count as nothing. The algorithm is Knuth's (A generalization of Dijkstra's algorithm, 1977).
    """
    _, *found = _RULE.split(_STARRED.sub(lambda part: _size(part[0]), _ATTRIBUTES.sub(r"\1", grammar)))
    lengths: dict[str, float] = dict.fromkeys(found[::2], inf)
    users: dict[str, list[_Sequence]] = defaultdict(list)
    known: list[tuple[int, str]] = []
    for rule, body in zip(found[::2], found[1::2], strict=True):
        for sequence in _sequences(rule, body):
            for name in sequence.needs:
                users[name].append(sequence)
            if not sequence.needs:
                heappush(known, (sequence.size, rule))
    while known:
        size, rule = heappop(known)
        if lengths[rule] < inf:
            continue
        lengths[rule] = size
        for sequence in users[rule]:
            sequence.size += size * sequence.needs.pop(rule)
            if not sequence.needs:
                heappush(known, (sequence.size, sequence.rule))
    return lengths


def _sequences(rule: str, body: str) -> Iterator[_Sequence]:
    """Alternatives of a rule, but for those with a class that matches nothing."""
    if _DISPATCH.match(body):
        body = "0"
    for text in _CALL.sub("0", body).partition("(=")[0].split("|"):  # behind that stands what follows elsewhere
        if _NONE not in text:
            size, needs = 0, Counter[str]()
            for piece in _PIECE.finditer(text):
                size += int(piece["size"] or 0)
                if piece["rule"] and piece["times"] != "0":
                    needs[piece["rule"]] += int(piece["times"] or 1)
            yield _Sequence(rule, size, needs)


def _size(part: str) -> str:
    """Characters of a literal or a class, as text; _NONE if it matches nothing."""
    if part.startswith('"'):
        return str(len(_ESCAPE.sub("x", part)) - 2)
    if part.endswith("*"):
        return "0"
    return _NONE if _is_empty(part) else "1"


def _is_empty(part: str) -> bool:
    """Whether a class holds no character."""
    if not part.startswith("[^") or part == "[^]":
        return part == "[]"
    spelled = _SPECIAL.sub(r"\\\1", part[2:-1])
    return re.search(f"[^{spelled}]", _characters()) is None


@cache
def _characters() -> str:
    return "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))
