"""A grammar never allows more than its schema, and what a grammar cannot hold is refused by name."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.constraints import Matcher
from distspec.constraints.schema import exact
from distspec.errors import BadConstraint
from distspec.protocol.values import Constraint
from tests.schemas import CIRCLE, DIGIT, SCHEMAS, thing
from tests.spelling import encode, end_id, grammars, walk

SEEDS = range(8)


def test_the_corpus_is_large() -> None:
    assert len(SCHEMAS) >= 60


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_a_grammar_allows_is_json_of_its_schema(name: str) -> None:
    """Random walks: any text that the masks let through."""
    schema = SCHEMAS[name]
    judge = jsonschema.Draft202012Validator(schema)
    for seed in SEEDS:
        text = schema_walk(schema, seed)
        judge.validate(json.loads(text))


@pytest.mark.parametrize("name", ["person", "digits", "either", "tree", "unicode keys", "other numbers"])
def test_values_of_a_schema_are_allowed(name: str) -> None:
    """As compact text, properties in their order: what a walk found, written anew."""
    schema = SCHEMAS[name]
    for seed in SEEDS:
        value = json.loads(schema_walk(schema, seed))
        assert accepts(schema, json.dumps(value, ensure_ascii=False, separators=(",", ":")))


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({"not": DIGIT}, "not"),
        ({"if": DIGIT, "then": DIGIT}, "if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": DIGIT}, "contains"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"allOf": [DIGIT, DIGIT]}, "allOf"),
        ({"oneOf": [DIGIT, {"type": "number"}]}, "oneOf"),
        ({"oneOf": [CIRCLE, CIRCLE]}, "oneOf"),
        ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, "oneOf"),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": DIGIT}}, "minimum"),
        ({"$ref": "https://example.com/schema"}, "$ref"),
        ({"enum": [1, 9], "maximum": 5}, "maximum"),
        ({"type": "string", "const": 3}, "const"),
        ({"anyOf": [DIGIT], "minimum": 5}, "minimum"),
        ({"type": "string", "anyOf": [{"type": "integer"}]}, "anyOf.type"),
        ({"type": "string", "pattern": "a*", "maxLength": 2}, "maxLength"),
        ({"minLength": 1, "minimum": 1}, "type"),
        ({"type": "text"}, "type"),
        ({"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False}, "required"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        (thing(True, a=thing(True, b={"not": DIGIT})), "properties.a.properties.b.not"),
        ({"$defs": {"d": {"not": DIGIT}}, "$ref": "#/$defs/d"}, "$defs.d.not"),
        ({"type": "array", "items": {"uniqueItems": True}}, "items.uniqueItems"),
        ({"anyOf": [{"type": "null"}, {"not": {}}]}, "anyOf[1].not"),
        ({"type": "object", "properties": []}, "properties"),
        ({"type": "array", "items": 3}, "items"),
        ({"enum": "abc"}, "enum"),
    ],
)
def test_what_a_grammar_cannot_hold_is_refused_by_name(schema: dict[str, Any], field: str) -> None:
    with pytest.raises(BadConstraint) as error:
        exact(schema)
    assert str(error.value).startswith(field)


def test_a_schema_that_is_nested_for_ever_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(20_000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(BadConstraint, match="deep"):
        exact(schema)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES)
def test_an_enum_of_a_value_allows_exactly_that(value: object) -> None:
    assert json.loads(schema_walk({"enum": [value]}, 0)) == value


def schema_walk(schema: dict[str, Any], seed: int) -> str:
    return walk(Constraint(kind="json_schema", text=json.dumps(schema)), seed)


def accepts(schema: dict[str, Any], text: str) -> bool:
    matcher = Matcher(grammars().find(Constraint(kind="json_schema", text=json.dumps(schema))).result())
    return matcher.allowed(tokens := [*encode(text), end_id()]) == len(tokens)
