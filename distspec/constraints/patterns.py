"""Expressions that mean the same to all who read them: ECMA 262, to which JSON Schema refers, and Python's `re`, with
which answers are mostly validated.

Knows the syntax of expressions. Does not know schemas or grammars.

Their classes differ: \\d of Python is any decimal digit, that of ECMA one of ten. Where nothing looks around, an
expression whose classes hold less matches less, so each class becomes what it is to both. What only one of them can
read, or xgrammar passes over, is refused. The result is ASCII, which xgrammar makes automata of.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache

from distspec.constraints.anchors import MISPLACED, are_outermost
from distspec.errors import BadConstraint

Ranges = Sequence[tuple[int, int]]
"""Code points, first and last of each run, in order."""

_LAST = 0x10FFFF
_ONCE = "{0,1}"
_NO_DOT = "^\\n\\r\\u2028\\u2029"
_WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = ((9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F))
_SPACES = (*_SPACE, (0x205F, 0x205F), (0x3000, 0x3000))
_SYMBOLS = (
    *((0xA0, 0xA9), (0xAB, 0xB1), (0xB6, 0xB8), (0xBB, 0xBB), (0xBF, 0xBF), (0xD7, 0xD7), (0xF7, 0xF7)),
    *((0x2010, 0x2027), (0x2030, 0x205E), (0x20A0, 0x20BF), (0x2190, 0x23FF), (0x2500, 0x2775), (0x2794, 0x2B73)),
    *((0x3001, 0x3003), (0x3008, 0x3020), (0xFF01, 0xFF0F), (0xFF1A, 0xFF20), (0x1F300, 0x1F6D2), (0x1F900, 0x1F9FF)),
)
"""Punctuation, arrows, emoji and other characters that nobody takes for letters or digits: not all there are, which are
in hundreds of runs."""
_BOTH: dict[str, Ranges] = {"d": ((0x30, 0x39),), "w": _WORD, "s": _SPACES}
"""What a class holds to both."""

_PART = re.compile(
    r"(?P<escape>\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.))"
    r"|\[(?P<members>(?:\\.|[^\]\\])*)\]"
    r"|(?P<group>\((?:\?(?::|P?<(?P<name>\w+)>))?)"
    r"|(?P<repeat>(?:[*+?]|\{\d+(?:,\d*)?\})\??)"
    r"|(?P<other>.)",
    re.DOTALL,
)
_MEMBER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)|.", re.DOTALL)
_CONTROLS = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r"}
_CLASS = re.compile(r"\\[dDwWsS]")
_COMMON = re.compile(r"\\(?:[tnvfr]|x..|u(?![dD][89a-fA-F])....|[ -/:-@\[-`{-~])")
"""Escapes of one character that all read alike; half of a surrogate pair is none."""
_PLAIN = ((0x20, 0x21), (0x23, 0x5B), (0x5D, _LAST))
"""What JSON spells as it is."""
_OPTIONAL = ("?", "*", "{0")
_LEFT_FREELY = 64
"""Begins of names that any other character may follow. Each costs a compiler 25 ms where there are 150,000 tokens."""
_SEPARATING = "_0123456789-"
_SPECIAL = "^$\\.*+?()[]{}|/-"
"""Characters that need their escape somewhere."""


def common(pattern: str) -> str:
    """An expression in ASCII that matches nothing but what this one does to both. Raises BadConstraint."""
    if not are_outermost(pattern):
        raise BadConstraint(MISPLACED)
    names = [part["name"] for part in _PART.finditer(pattern) if part["name"]]
    for name, count in Counter(names).items():
        if not name.isidentifier() or count > 1:
            raise BadConstraint(f"a group named {name} {'twice' if count > 1 else 'is not read alike everywhere'}")
    found = []
    for part in _PART.finditer(pattern):
        text, following = part[0], pattern[part.end() : part.end() + 1]
        if part["escape"]:
            held = _held(text[1], negated=False) if _CLASS.fullmatch(text) else None
            found.append(_one(text) if held is None else _written(held))
        elif part["members"] is not None:
            found.append(_class(part["members"]))
        elif part["group"]:
            if text == "(" and following == "?":
                raise BadConstraint("looking around, and flags within an expression, are not supported")
            found.append("(" if "<" in text else text)
        elif part["repeat"]:
            if following and following in "*+?{":
                raise BadConstraint(f"{text}{following} repeats what is repeated, which is not read alike everywhere")
            # Lazy or not is all the same to a whole match. xgrammar's automaton of (ab*)? matches b.
            found.append(_ONCE if text.startswith("?") else text.removesuffix("?"))
        elif text == "{":
            raise BadConstraint("{ begins no count; as a character it is \\{")
        elif text == "[":
            raise BadConstraint("[ begins a class that has no end; as a character it is \\[")
        else:
            found.append(f"[{_NO_DOT}]" if text == "." else text if text in "^$|)" else _one(text))
    return "".join(found)


def needs_escapes(pattern: str) -> bool:
    """Whether some character of an expression that `common` reads, and that may not be left out, is one that JSON only
    spells escaped. xgrammar's masks know no such spelling: a text may come up to there, and then nothing may follow."""
    for part in _PART.finditer(pattern):
        may_be_left_out = pattern.startswith(_OPTIONAL, part.end())
        held = _matched(part)
        if (
            held
            and not may_be_left_out
            and not any(first <= b and a <= last for first, last in held for a, b in _PLAIN)
        ):
            return True
    return False


def _matched(part: re.Match[str]) -> Ranges:
    """What a part that is a character, or a class, matches; nothing for others."""
    if part["members"] is not None:
        held, negated = _ranges(part["members"])
        return _others(sorted(held)) if negated else held
    if _CLASS.fullmatch(part[0]):
        return _held(part[0][1], negated=False)
    is_character = part["escape"] or (part["other"] and part[0] not in "^$|).")
    return [(_point(part[0]), _point(part[0]))] if is_character else []


def none_of(names: Collection[str]) -> str:
    """An expression in ASCII for texts of one line that are none of these names: for all of them where names are few.

    Where a text may leave the names by any character, nearly every token may follow, each of which a compiler tries. So
    beyond the first characters of many names, a text leaves them by what separates words, or by its end.
    """
    begins = sorted({"", *(name[:end] for name in names for end in range(len(name) + 1))}, key=lambda it: (len(it), it))
    heads = dict.fromkeys(begins, "")
    for begin in begins[1:]:
        heads[begin[:-1]] += begin[-1]
    freely = set(begins[:_LEFT_FREELY])
    # By begin: what follows it up to where no name begins so, and what makes it another begin, or leaves it one.
    leaving, ending = dict[str, str](), dict[str, str]()
    for begin in reversed(begins):
        other = _other_than(heads[begin], freely=begin in freely)
        longer = [(_code(ord(head)), begin + head) for head in heads[begin]]
        leaving[begin] = _any_of([other] * bool(other) + [code + leaving[more] for code, more in longer])
        ends = [code + ending[more] for code, more in longer if more in ending]
        if begin not in names:
            ending[begin] = _any_of(ends) + _ONCE if ends else ""
        elif ends:
            ending[begin] = _any_of(ends)
    ways = [f"{leaving['']}.*", *filter(None, [ending.get("")])]
    return _any_of(ways) + ("" if "" in names else _ONCE)


def _other_than(heads: str, *, freely: bool) -> str:
    """A class of characters that are none of these; empty where there is none."""
    if freely:
        return f"[^{''.join(_code(ord(head)) for head in heads)}]" if heads else "."
    left = [one for one in _SEPARATING if one not in heads]
    return f"[{''.join(left)}]" if left else ""


def _any_of(ways: Sequence[str]) -> str:
    return f"(?:{'|'.join(ways)})"


def _class(text: str) -> str:
    """By its members."""
    held, negated = _ranges(text)
    return _written(held, negated=negated)


def _ranges(text: str) -> tuple[Ranges, bool]:
    """What the members of a class are, and whether it holds all but these."""
    negated = text.startswith("^")
    parts = _MEMBER.findall(text[negated:])
    if not parts:
        raise BadConstraint("an empty class is not read alike everywhere; as a character, ] is \\]")
    if any(f"\\{kind}" in parts and f"\\{kind.upper()}" in parts for kind in _BOTH):
        return [(0, _LAST)], negated
    return _members(parts, negated), negated


def _members(parts: Sequence[str], negated: bool) -> list[tuple[int, int]]:
    found, at = list[tuple[int, int]](), 0
    while at < len(parts):
        part, *after = parts[at : at + 3]
        is_range = len(after) == 2 and after[0] == "-"
        if is_range and (_CLASS.fullmatch(part) or _CLASS.fullmatch(after[1])):
            raise BadConstraint(f"a range from or to a class, {part}-{after[1]}, is not read alike everywhere")
        if _CLASS.fullmatch(part):
            found += _held(part[1], negated=negated)
        else:
            found.append((_point(part), _point(after[1] if is_range else part)))
            if found[-1][0] > found[-1][1]:
                raise BadConstraint(f"the range {part}-{after[1]} ends before it begins")
        at += 3 if is_range else 1
    return found


def _held(kind: str, *, negated: bool) -> Ranges:
    """What \\d or the like holds to both; among what a class does not hold, to either."""
    if kind.islower():
        return _either(kind) if negated else _BOTH[kind]
    return _others(_BOTH[kind.lower()] if negated else _either(kind.lower()))


def _either(kind: str) -> Ranges:
    """What a class may hold to one of them."""
    if kind == "d":
        return _decimals()
    if kind == "s":
        return sorted([*_SPACES, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)])
    return (*_WORD, *_others([(0, 0x7F), *_SYMBOLS]))


@cache
def _decimals() -> Ranges:
    """All digits of Python's: ten in a row, by Unicode."""
    zeros = (code for code in range(_LAST) if chr(code).isdecimal() and int(chr(code)) == 0)
    return tuple((zero, zero + 9) for zero in zeros)


def _others(ranges: Ranges) -> Ranges:
    """All that is in none of these."""
    firsts = [0, *(last + 1 for _, last in ranges)]
    lasts = [*(first - 1 for first, _ in ranges), _LAST]
    return [(first, last) for first, last in zip(firsts, lasts, strict=True) if first <= last]


def _written(ranges: Ranges, *, negated: bool = False) -> str:
    """A class. xgrammar writes some characters of one as \\x and two digits, but reads all digits that follow, so those
    that print come first; and it forgets the escape of a ^ at the beginning, so that one comes last."""
    cuts = (0, 0x20, ord("^"), ord("^") + 1, 0x7F, _LAST + 1)
    parts = [
        (max(first, start), min(last, end - 1))
        for start, end in (cuts[1:3], cuts[3:5], cuts[:2], cuts[4:])
        for first, last in ranges
        if first < end and last >= start
    ]
    inner = "".join(f"{_code(first)}-{_code(last)}" for first, last in parts)
    caret = "\\^" if any(first <= ord("^") <= last for first, last in ranges) else ""
    return f"[^{inner}{caret}]" if negated else f"[{inner}{caret}]" if inner else caret


def _point(part: str) -> int:
    """Of one character of a class."""
    written = _one(part)
    if not written.startswith("\\"):
        return ord(written)
    if written[1] == "u":
        return int(written[2:].strip("{}"), 16)
    return ord(_CONTROLS.get(written[1], written[1]))


def _one(text: str) -> str:
    """One character, as it stands in an expression."""
    if text.startswith("\\"):
        if not _COMMON.fullmatch(text):
            raise BadConstraint(f"{text} is not supported, or not read alike everywhere")
        if text[1] == "x":  # of which xgrammar takes all digits that follow
            return _code(int(text[2:], 16))
        return text if text[1].isalpha() or text[1] in _SPECIAL else text[1]
    if text in ("[", "]", "}"):
        return f"\\{text}"
    if "\ud800" <= text <= "\udfff":
        raise BadConstraint("half of a surrogate pair is no character")
    return text if text.isascii() else _code(ord(text))


def _code(point: int) -> str:
    return f"\\u{point:04x}" if point < 1 << 16 else f"\\u{{{point:x}}}"
