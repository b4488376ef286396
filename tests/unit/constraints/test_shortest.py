"""A grammar is only taken if whatever it allows can be finished soon, which also keeps its matcher from spelling out
what must come for ever."""

from __future__ import annotations

import json
from itertools import pairwise
from math import inf

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from distspec.constraints.shortest import shortest
from distspec.errors import BadConstraint
from distspec.protocol.values import Constraint
from tests.schemas import SCHEMAS
from tests.spelling import grammars

NAMES = ("root", "a", "b-1", "c.d")
SIZES = {'"xy"': 2, '"a | (b\\n"': 7, "[^a-z]": 1, "[^[|]": 1, "[]": inf, "[^\\0-\\U0010ffff]": inf, '""': 0, "[]*": 0}
COUNTS = {"": 1, "{1,3}": 1, "{2}": 2, "{3,200}": 3, "*": 0, "{0,200}": 0}
PARTS = {f"{name}{count}": (name, times) for name in NAMES for count, times in COUNTS.items()}
"""What a sequence may hold beside texts and classes: a rule, and how often at least."""
RULES = st.fixed_dictionaries(
    {
        name: st.lists(st.lists(st.sampled_from([*SIZES, *PARTS]), min_size=1, max_size=3), min_size=1, max_size=3)
        for name in NAMES
    }
)


@given(RULES)
def test_of_each_rule_the_shortest_alternative_counts(rules: dict[str, list[list[str]]]) -> None:
    known: dict[str, float] = dict.fromkeys(NAMES, inf)

    def size(part: str) -> float:
        name, times = PARTS.get(part, (part, 1))
        return {**SIZES, **known}[name] * times if times else 0

    for _ in NAMES:
        known = {name: min(sum(map(size, parts)) for parts in rules[name]) for name in NAMES}
    text = "\n".join(f"{name} ::= {' | '.join(map(' '.join, parts))}" for name, parts in rules.items())
    found = shortest(str(xgrammar.Grammar.from_ebnf(text)))
    assert {name: found[name] for name in NAMES} == known, text


ENDLESS_SCHEMA = {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}}}
TAG = {"begin": "<a>", "content": {"type": "grammar", "grammar": 'root ::= "a" root'}, "end": "</a>"}
DOUBLED = "\n".join(f"{name} ::= {after} {after}" for name, after in pairwise(["root", *"abcdefghijklmnop"]))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("grammar", 'root ::= "a" root'),
        ("grammar", 'root ::= "a" | "b" x\nx ::= "c" x'),
        ("grammar", f'{DOUBLED}\np ::= "x"'),
        ("grammar", 'root[capture="y"] ::= x\nx[max_chars=5] ::= "a" x'),
        ("regex", r"a+[^\s\S]"),
        ("regex", "((((x{60}){60}){60}){60})"),
        ("json_schema", json.dumps(ENDLESS_SCHEMA)),
        ("json_schema", json.dumps({"type": "string", "pattern": r"^a+[^\d\D]$"})),
        ("structural_tag", json.dumps({"format": {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG]}})),
    ],
)
def test_what_does_not_end_is_refused(kind: str, text: str) -> None:
    with pytest.raises(BadConstraint, match="characters at least"):
        grammars().find(Constraint(kind=kind, text=text)).result()


@pytest.mark.parametrize("attribute", ["", '[capture="y"]', "[max_chars=5]", '[capture="x] ::= y"]'])
def test_attributes_of_a_rule_change_nothing(attribute: str) -> None:
    found = shortest(str(xgrammar.Grammar.from_ebnf(f'root ::= "a" x\nx{attribute} ::= "bc" | "d" "e" root')))
    assert (found["root"], found["x"]) == (3, 2)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_ends_is_not(name: str) -> None:
    grammars().find(Constraint(kind="json_schema", text=json.dumps(SCHEMAS[name]))).result()
