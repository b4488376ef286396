"""An expression whose anchors are outermost matches the same whole texts without them."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.constraints.anchors import are_outermost

TEXTS = ["".join(text) for length in range(5) for text in product("ab", repeat=length)]
PIECES = st.recursive(
    st.sampled_from(["a", "b", "^", "$", "^a", "b$", "[^a]", "a?", r"\^", r"\$", ""]),
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map("|".join)
        | inner.map("({})".format)
        | st.tuples(inner, st.sampled_from("*+?")).map(lambda piece: f"(?:{piece[0]}){piece[1]}")
    ),
    max_leaves=6,
)


def bare(pattern: str) -> str:
    """Without its anchors."""
    return re.sub(r"(\\.|\[\^a\])|[\^$]", lambda found: found[1] or "(?:)", pattern)


@given(PIECES)
def test_they_may_be_left_out_where_they_are_outermost(pattern: str) -> None:
    if are_outermost(pattern):
        for text in TEXTS:
            assert bool(re.fullmatch(pattern, text)) == bool(re.fullmatch(bare(pattern), text)), (pattern, text)


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "a",
        "^a$",
        "^a|b$",
        "^$|^a$",
        "(^a$)|(^b$)",
        "^(a|^b)c",
        r"a\^b\$c",
        "[$^]",
        "a[^b]",
        "^(?:ab)*$",
        "(?<x>^a)b",
    ],
)
def test_common_ones_are(pattern: str) -> None:
    assert are_outermost(pattern)


@pytest.mark.parametrize("pattern", ["a^", "$a", "^a(^b|c)$", "a(b$|c)d", "(^a)*", "(a$)+", "(a|b$)?c", "((^a)|b)+"])
def test_others_are_not(pattern: str) -> None:
    assert not are_outermost(pattern)
