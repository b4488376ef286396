"""Where a regular expression says ^ and $, since xgrammar passes over them wherever they are.

Knows groups, classes and escapes of expressions, as ECMA has them. Does not know schemas or grammars.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MISPLACED = "^ and $ are only supported at the ends of what is matched"

_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\((?:\?(?::|P?<\w+>))?|.", re.DOTALL)
_REPEATS = ("*", "+", "?", "{")


def are_outermost(pattern: str) -> bool:
    """Whether each ^ can only be met where a match begins, and each $ only where it ends: then nothing is lost where an
    expression has to match the whole text anyway."""
    parts = ["(" if part.startswith("(") else part for part in _PART.findall(pattern)]
    turned = [{"(": ")", ")": "("}.get(part, part) for part in reversed(parts)]
    return _comes_first("^", parts, _REPEATS) and _comes_first("$", turned, ())


def _comes_first(anchor: str, parts: Sequence[str], repeats: Sequence[str]) -> bool:
    """Whether nothing can stand before the anchor. repeats: what may not follow a group that holds it, since it would
    stand before itself; read from its end, an expression says so before the group."""
    is_first, holds = True, False
    opened = [(True, False)]  # of each group: whether nothing stands before it, and whether the anchor did so far
    for part, following in zip(parts, [*parts, ""][1:], strict=True):
        if part == anchor:
            if not is_first:
                return False
            holds = True
        elif part == "(":
            opened.append((is_first, holds))
            holds = False
        elif part == "|":
            is_first = opened[-1][0]
        elif part == ")" and len(opened) > 1:
            if holds and following in repeats:
                return False
            before = opened.pop()[1]
            is_first, holds = False, holds or before
        else:
            is_first = False
    return True
