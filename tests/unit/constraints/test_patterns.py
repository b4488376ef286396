"""What an expression has become matches nothing that ECMA or Python would not."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.constraints import Matcher
from distspec.constraints.patterns import common, none_of
from distspec.errors import BadConstraint
from distspec.protocol.values import Constraint
from tests.spelling import encode, end_id, grammars, walk

SPACES = "\t\n\v\f\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
OF_ECMA = {"d": "0-9", "w": "A-Za-z0-9_", "s": SPACES}
KINDS = [*OF_ECMA, *(kind.upper() for kind in OF_ECMA)]
TRICKY = "a5_- \n\r\x1c\x85\u0663\u00e9\u00a0\u2028\ufeff\u3000\u6f22\u3001\U0001f600\U0001d7ce\U00010ffff"
TEXTS = st.text(st.sampled_from(TRICKY), max_size=4)


def ecma(kind: str) -> str:
    """A class of ECMA's as one of Python's."""
    return f"[^{OF_ECMA[kind.lower()]}]" if kind.isupper() else f"[{OF_ECMA[kind]}]"


def others(kind: str) -> str:
    return f"[{OF_ECMA[kind.lower()]}]" if kind.isupper() else f"[^{OF_ECMA[kind]}]"


def of_class(negated: bool, kinds: list[str], chars: list[str]) -> tuple[str, str]:
    """An expression, and what it means in ECMA as one of Python's."""
    inner = "".join(f"\\{kind}" for kind in kinds) + "".join(chars)
    if negated:
        meant = "".join(f"(?={others(kind)})" for kind in kinds) + (f"[^{''.join(chars)}]" if chars else r"[\s\S]")
        return f"[^{inner}]", f"(?:{meant})"
    meant = "|".join([*map(ecma, kinds), *([f"[{''.join(chars)}]"] if chars else [])])
    return f"[{inner}]", f"(?:{meant})"


CHARS = st.lists(
    st.sampled_from(
        [
            "a",
            "0-9",
            "\u00e9",
            "\u00e9-\u00fc",
            "\\x41",
            "\\x5e",
            "\\^",
            "\\u6f22",
            "\\n",
            "\\[",
            "\\]",
            "a-z",
            "A-\u00e9",
        ]
    ),
    max_size=3,
)
LEAVES = st.one_of(
    st.sampled_from(["a", "5", "\u00e9", "\\u6f22", "\\-", "\\x5f", "\U0001f600", "\\n"]).map(lambda one: (one, one)),
    st.sampled_from(KINDS).map(lambda kind: (f"\\{kind}", ecma(kind))),
    st.just((".", "[^\n\r\u2028\u2029]")),
    st.builds(of_class, st.booleans(), st.lists(st.sampled_from(KINDS), min_size=1, max_size=2), CHARS),
    st.builds(of_class, st.booleans(), st.just([]), CHARS.filter(bool)),
)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda both: (both[0][0] + both[1][0], both[0][1] + both[1][1])),
        st.tuples(inner, inner).map(lambda both: tuple(f"(?:{one}|{other})" for one, other in zip(*both, strict=True))),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,2}", "{0}", "{2,}", "*?"])).map(
            lambda repeat: tuple(f"(?:{one}){repeat[1]}" for one in repeat[0])
        ),
    ),
    max_leaves=5,
)


def of_python(expression: str) -> str:
    """Python spells code points beyond 16 bits in its own way."""
    return re.sub(r"\\u\{(\w+)\}", lambda code: f"\\U{int(code[1], 16):08x}", expression)


@settings(max_examples=400, deadline=None)
@given(both=EXPRESSIONS, texts=st.lists(TEXTS, min_size=20, max_size=20))
def test_what_it_matches_both_match(both: tuple[str, str], texts: list[str]) -> None:
    pattern, meant = both
    found = common(pattern)
    assert found.isascii()
    narrow = re.compile(of_python(found))
    for text in texts:
        if narrow.fullmatch(text):
            assert re.fullmatch(pattern, text), (pattern, found, text)
            assert re.fullmatch(meant, text), (pattern, found, text)


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"\d+", ["0", "19"]),
        (r"\D", ["a", "\u00e9", "\u6f22", "\u0905", "\U0001f600"]),
        (r"\S+", ["a\u6f22\U0001f600"]),
        (r"[^\s,]", ["a", "\u00e9", "5"]),
        (r"\W", ["-", " ", "\u00bb", "\u2014", "\u3001", "\U0001f600"]),
        (r"[^\w]", ["-", " ", "\u00bb", "\u2014", "\u3001", "\U0001f600"]),
        (r"[\s\S]*", ["a \u6f22\n"]),
        (r"[\w\W]*", ["a-\u00e9"]),
        (r"[\w-]+", ["a-b"]),
        (r"[-\d]", ["-", "5"]),
        (r"[\^$]", ["^", "$"]),
        (r"[\^]", ["^"]),
        (r"[\^-b]", ["^", "a"]),
        ("[\u00e9a]\\x41b", ["\u00e9Ab", "aAb"]),
        ("\u00e9.", ["\u00e9\u6f22", "\u00e9\U0001f600"]),
        (r"(?P<year>\d{4})", ["2024"]),
        (r"(?<year>\d{4})-a\ b\#", ["2024-a b#"]),
        ("^(a]|b})$", ["a]", "b}"]),
        (re.escape("a.b [c] {d} #~&-"), ["a.b [c] {d} #~&-"]),
    ],
)
def test_what_both_match_is_kept(pattern: str, texts: list[str]) -> None:
    for text in texts:
        assert re.fullmatch(of_python(common(pattern)), text), text


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?=a)a", "(?!a)b", "(?<=a)b", "(?<!a)b", "(?i)a", "(?i:a)", "(?>a)", "(?#a)"),
        *("(?P<a>x)(?P<a>y)", "(?<a>x)|(?P<a>y)", "(?P<1a>x)"),
        *("a++", "a*+", "a**", "a{2}{3}", "a{2}+", "a{", "a{,3}", "a{x}"),
        *(r"\bA", r"a\B", r"\Aa", r"a\Z", r"(a)\1", r"\0", r"\cA", r"\p{L}", r"\q", r"\u{41}", r"\x4", r"[\b]"),
        *(
            r"\ud83d\ude00",
            r"[\ud83d]",
            "a|\ud83d",
            "[a\ud83d]",
            "\\",
            "[",
            "a[b",
            "[]",
            "[^]",
            "[]a]",
            "[^]a]",
            r"[z-a]",
            r"[\w-.]",
            r"[+-\d]",
            "a^b",
        ),
    ],
)
def test_what_is_not_read_alike_is_refused(pattern: str) -> None:
    with pytest.raises(BadConstraint):
        common(pattern)


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_holds_no_character_that_python_leaves_out(kind: str) -> None:
    every = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))
    for pattern in (f"\\{kind}", f"[^\\{kind}]"):
        held = "".join(re.findall(of_python(common(pattern)), every))
        assert re.fullmatch(f"{pattern}+", held)


@pytest.mark.parametrize("kind", ["json_schema", "regex"])
@settings(max_examples=100, deadline=None)
@given(
    both=EXPRESSIONS.filter(lambda both: len(both[0]) < 60),
    texts=st.lists(st.text(st.sampled_from("a5_-^A\u00e9\u0e9a\u6f22\U0001f600"), max_size=4), min_size=30),
)
def test_a_text_is_held_to_what_it_has_become(kind: str, both: tuple[str, str], texts: list[str]) -> None:
    """xgrammar has several ways of reading expressions."""
    schema = json.dumps({"type": "string", "pattern": both[0]})
    try:
        found = grammars().find(Constraint(kind=kind, text=schema if kind == "json_schema" else both[0])).result()
    except BadConstraint:
        return
    narrow, matcher = re.compile(of_python(common(both[0]))), Matcher(found)
    for text in texts:
        tokens = [*encode(json.dumps(text, ensure_ascii=False) if kind == "json_schema" else text), end_id()]
        assert (matcher.allowed(tokens) == len(tokens)) == bool(narrow.fullmatch(text)), text


@pytest.mark.parametrize(
    "pattern", [*(f"^\\{kind}{{1,3}}$" for kind in KINDS), r"^[^\d\s]{1,5}$", "^.\u00e9.$", r"^[\s\S]$", r"^x(-\d*)??$"]
)
@pytest.mark.parametrize("kind", ["json_schema", "regex"])
def test_answers_match(pattern: str, kind: str) -> None:
    text = json.dumps({"type": "string", "pattern": pattern}) if kind == "json_schema" else pattern
    meant = re.sub(r"\\([dDwWsS])", lambda one: ecma(one[1]) if "[" not in pattern else one[0], pattern)
    for seed in range(40):
        answer = walk(Constraint(kind=kind, text=text), seed)
        found = json.loads(answer) if kind == "json_schema" else answer
        assert re.fullmatch(pattern, found), found
        assert re.fullmatch(meant, found), found


ESCAPED = [*map(chr, range(32)), '"', "\\"]


@pytest.mark.parametrize("char", ESCAPED)
def test_a_character_that_json_must_escape_is_refused_where_it_cannot_be_left_out(char: str) -> None:
    """A text could begin as if it might come, and would have no way on."""
    one = f"\\x{ord(char):02x}"
    for pattern in (f"a{one}", f"(?:a{one}|b)", f"a[{one}]+", f"a[{one}\\n]", f"a(?:{one}b)?", f"^{one}a{one}$"):
        with pytest.raises(BadConstraint, match=r"pattern: .*escape"):
            walk(Constraint(kind="json_schema", text=json.dumps({"type": "string", "pattern": pattern})), 0)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([*(f"\\x{ord(char):02x}" for char in ESCAPED), "a", "b"]), min_size=1), st.integers(0, 9)
)
def test_elsewhere_it_does_not_come_and_no_text_is_stuck(chars: list[str], seed: int) -> None:
    either = f"[{''.join(chars)}c]"
    for pattern in (f"{either}d", f"[^{''.join(chars)}]d", *(f"c{char}{few}d" for char in chars for few in "*?")):
        text = walk(Constraint(kind="json_schema", text=json.dumps({"type": "string", "pattern": pattern})), seed)
        assert re.fullmatch(pattern, json.loads(text))


LINES = st.text(st.sampled_from("ab\u00e9\U0001f600]^-"), max_size=3)


@given(names=st.lists(LINES, max_size=6, unique=True), texts=st.lists(LINES, min_size=10))
def test_what_is_none_of_some_names_is_all_else(names: list[str], texts: list[str]) -> None:
    found = of_python(none_of(names))
    for text in [*texts, *names, *(name + "a" for name in names)]:
        assert bool(re.fullmatch(found, text)) == (text not in names), text


@given(names=st.lists(st.text("abc_1", max_size=12), min_size=20, max_size=60, unique=True), texts=st.lists(LINES))
def test_names_that_are_many_are_left_at_the_end_or_between_words(names: list[str], texts: list[str]) -> None:
    found = re.compile(of_python(none_of(names)))
    begins = {name[:end] for name in names for end in range(len(name) + 1)}
    for text in [*names, *begins, *texts, *(f"{begin}{more}" for begin in begins for more in ("_x", "-", "9z", "d"))]:
        assert text not in names or not found.fullmatch(text), text
        is_begin, leaves = text in begins, next((i for i, _ in enumerate(text) if text[: i + 1] not in begins), 0)
        if text not in names and (is_begin or text[leaves] in "_-0123456789"):
            assert found.fullmatch(text), text


def test_few_places_are_left_by_any_character() -> None:
    """At each of them a compiler tries nearly all tokens."""
    names = [f"{head}{tail}_of_something" for head in "abcdefghij" for tail in "klmnopqrst"]
    found = none_of(names)
    assert 60 < found.count("[^") + found.count("(?:.)") <= 64
    assert found.count(".*") == 1
    assert re.fullmatch(of_python(found), "ba_of_something")
    assert re.fullmatch(of_python(found), "ak_of_some")
