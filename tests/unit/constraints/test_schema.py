"""A grammar never allows more than its schema, and what a grammar cannot hold is refused by name."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distspec.constraints import Matcher
from distspec.constraints.schema import exact
from distspec.errors import BadConstraint
from distspec.protocol.values import Constraint
from tests.schemas import ANY, CIRCLE, DIGIT, SCHEMAS, VALUES, thing
from tests.spelling import encode, end_id, grammars, walk

SEEDS = range(8)


def test_the_corpus_is_large() -> None:
    assert len(SCHEMAS) >= 60


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_a_grammar_allows_is_json_of_its_schema(name: str) -> None:
    """Random walks: any text that the masks let through."""
    schema = SCHEMAS[name]
    for seed in SEEDS:
        validator(schema).validate(json.loads(schema_walk(schema, seed)))


@pytest.mark.parametrize("name", SCHEMAS)
def test_so_it_does_inside_a_structural_tag(name: str) -> None:
    for seed in SEEDS[:4]:
        text = walk(inside_a_tag(SCHEMAS[name]), seed)
        validator(SCHEMAS[name]).validate(json.loads(text.removeprefix("<call>").removesuffix("</call>")))


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
        ({"$ref": "#here", "$defs": {"a": {"$anchor": "here"} | DIGIT}}, "$ref"),
        ({"$defs": {"a": {"$id": "https://example.com/a"} | DIGIT}, "$ref": "#/$defs/a"}, "$defs.a.$id"),
        ({"type": "number", "minimum": 1e-9, "maximum": 1e-8}, "minimum"),
        ({"type": "number", "exclusiveMinimum": 0.1, "exclusiveMaximum": 0.100001}, "minimum"),
        ({"type": "number", "minimum": "5"}, "minimum"),
        ({"enum": [1, 9], "maximum": 5}, "maximum"),
        ({"type": "string", "const": 3}, "const"),
        ({"anyOf": [DIGIT], "minimum": 5}, "minimum"),
        ({"type": "string", "anyOf": [{"type": "integer"}]}, "anyOf.type"),
        ({"type": "string", "pattern": "a*", "maxLength": 2}, "maxLength"),
        ({"type": "string", "pattern": "^a(^b|c)$"}, "pattern"),
        ({"type": "object", "patternProperties": {"a$b": DIGIT}}, "patternProperties"),
        ({"minLength": 1, "minimum": 1}, "type"),
        ({"type": "text"}, "type"),
        ({"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False}, "required"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "object", "patternProperties": {"a": DIGIT}, "minProperties": 1}, "minProperties"),
        ({"type": "object", "patternProperties": {"a": DIGIT}, "additionalProperties": True}, "patternProperties"),
        ({"type": "object", "patternProperties": {"a": DIGIT, "b": {}}}, "patternProperties"),
        (thing(None, a=DIGIT) | {"patternProperties": {"^[^b]$": {}}}, "patternProperties"),
        (thing(None, **{"a" * 50_000: DIGIT}) | {"additionalProperties": True}, "additionalProperties"),
        (thing(None, a=DIGIT) | {"propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"type": "object", "propertyNames": {"pattern": "a"}, "additionalProperties": False}, "propertyNames"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf"),
        ({"type": "integer", "multipleOf": 5, "minimum": 3}, "multipleOf"),
        ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 10**6}, "multipleOf"),
        ({"type": "integer", "multipleOf": 5, "minimum": 6, "maximum": 9}, "multipleOf"),
        (thing(True, a=thing(True, b={"not": DIGIT})), "properties.a.properties.b.not"),
        ({"$defs": {"d": {"not": DIGIT}}, "$ref": "#/$defs/d"}, "$defs.d.not"),
        ({"type": "array", "items": {"uniqueItems": True}}, "items.uniqueItems"),
        ({"anyOf": [{"type": "null"}, {"not": {}}]}, "anyOf[1].not"),
        ({"type": "object", "properties": []}, "properties"),
        ({"type": "array", "items": 3}, "items"),
        ({"enum": "abc"}, "enum"),
        ({"enum": []}, "enum"),
        ({"const": 2**63}, "const"),
        ({"enum": [1, {"a": [-(2**63) - 1]}]}, "enum"),
        ({"type": "integer", "multipleOf": 1025}, "multipleOf"),
        ({"type": "integer", "multipleOf": 2**62, "minimum": 0, "maximum": 2**64}, "multipleOf"),
        ({"type": "integer", "minimum": 5, "exclusiveMaximum": 5}, "minimum"),
        ({"type": "integer", "exclusiveMaximum": -(2**63)}, "exclusiveMaximum"),
        *(({"type": kind, "minimum": bad}, "minimum") for kind in ("integer", "number") for bad in (True, None, [1])),
        *(({"type": "number", "maximum": bad}, "maximum") for bad in (float("nan"), float("inf"), -(10**400))),
        *(
            ({"type": kind, f"{end}{of}": bad}, f"{end}{of}")
            for kind, of in (("string", "Length"), ("array", "Items"), ("object", "Properties"))
            for end in ("min", "max")
            for bad in (-1, 1.5, "2", True, None)
        ),
        ({"type": "string", "format": 5}, "format"),
    ],
)
def test_what_a_grammar_cannot_hold_is_refused_by_name(schema: dict[str, Any], field: str) -> None:
    with pytest.raises(BadConstraint) as error:
        exact(schema)
    assert str(error.value).startswith(field)


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": -7, "maximum": 12},
        {"exclusiveMinimum": -5, "exclusiveMaximum": 10},
        {"minimum": -5.5, "maximum": 9.5, "exclusiveMinimum": -7},
        {"exclusiveMinimum": -5.5, "exclusiveMaximum": 10.5},
    ],
)
def test_the_multiples_between_bounds_are_all_of_them(bounds: dict[str, float]) -> None:
    schema = {"type": "integer", "multipleOf": 5, **bounds}
    found = exact(schema)
    assert isinstance(found, dict)
    assert found["enum"] == [number for number in range(-30, 30) if validator(schema).is_valid(number)]


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
LARGE = st.sampled_from([1, -1]).flatmap(
    lambda sign: st.one_of(
        st.floats(1e9, 1e19).map(lambda bound: sign * bound),
        st.sampled_from([2**33, 2**53 + 1, 2**63 - 1, 2**63, 10**30, 1e11, 1e16, 1e24]).map(lambda it: sign * it),
    )
)


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional=dict.fromkeys(BOUNDS, LARGE | st.floats(-200, 200) | st.integers(-200, 200)),
    ),
    st.integers(0, 9),
)
@example({"type": "number", "exclusiveMinimum": 10**11}, 0)
@example({"type": "number", "minimum": 2**53 + 1}, 0)
@example({"type": "integer", "minimum": -7.596241815575839e17}, 0)
def test_numbers_near_their_bounds_are_within_them_as_floats_too(schema: dict[str, Any], seed: int) -> None:
    """Whatever is allowed, and whatever is spelled nearly like a bound."""
    try:
        texts = [schema_walk(schema, seed)]
    except BadConstraint:
        return
    for bound in (schema[name] for name in BOUNDS if name in schema):
        for step in ("0", "0.000001", "0.00001", "0.5", "1"):
            texts += [
                format(Decimal(bound) + sign * Decimal(step), f".{places}f") for sign in (1, -1) for places in (0, 6)
            ]
    for text in texts:
        assert validator(schema).is_valid(json.loads(text)) or not accepts(schema, text), text


def test_bounds_of_integers_need_not_be_integers_or_of_64_bits() -> None:
    schema = {"type": "integer", "exclusiveMinimum": -1.5, "maximum": 1e30}
    assert [number for number in (-2, -1, 0, 2**62) if accepts(schema, str(number))] == [-1, 0, 2**62]


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "object", "required": []}, ["{}", '{"a":1}', '{"a":1,"b":[2]}']),
        ({"type": "object", "required": ["a"]}, ['{"a":1}', '{"a":{},"b":[2]}']),
        ({"maxProperties": 1}, ["{}", '{"a":1}']),
        ({"type": "object", "minProperties": 0}, ["{}", '{"a":1}']),
        ({"type": "array", "maxItems": 2}, ["[]", "[1]", '[{},"a"]']),
        ({"minItems": 1}, ["[1]", '[{},"a"]', "[1,2,3]"]),
    ],
)
def test_a_schema_that_does_not_say_what_is_in_a_value_allows_anything(schema: Any, texts: list[str]) -> None:
    """Beside a count, too."""
    for text in texts:
        validator(schema).validate(json.loads(text))
        assert accepts(schema, text), text


def test_a_schema_that_is_nested_for_ever_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(20_000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(BadConstraint, match="deep"):
        exact(schema)


NAMED = ("a", "ab", "é", 'q"', "a/b", "漢字", "😀", "\n", "")


@pytest.mark.parametrize("others", ["additionalProperties", "unevaluatedProperties"])
def test_a_property_that_is_named_does_not_come_again_as_another(others: str) -> None:
    """However its name is spelled."""
    schema = {"type": "object", "properties": dict.fromkeys(NAMED, DIGIT), others: {"type": "string"}}
    found = Matcher(grammars().find(Constraint(kind="json_schema", text=json.dumps(schema))).result())

    def allows(*keys: str) -> bool:
        tokens = [
            *encode("{" + ",".join(f"{key}:{value}" for key, value in zip(keys, ("1", '"b"'), strict=False)) + "}")
        ]
        return found.allowed([*tokens, end_id()]) > len(tokens)

    for name in NAMED:
        spellings = {json.dumps(name), json.dumps(name, ensure_ascii=False), json.dumps(name).replace("/", "\\/")}
        spellings |= {'"' + "".join(f"\\u{ord(char):04x}" for char in name if ord(char) < 1 << 16) + '"'}
        assert allows(json.dumps(name, ensure_ascii=False))
        assert not any(allows('"a"', spelling) for spelling in spellings), name
    assert all(allows('"a"', key) for key in ('"b"', '"abc"', '"éa"', '"漢"', '"q"', '"𐐀"'))


@settings(max_examples=300)
@given(ANY, st.booleans(), st.integers(0, 9))
def test_a_schema_is_held_to_or_refused_alone_and_inside_a_structural_tag(schema: Any, tagged: bool, seed: int) -> None:
    constraint = inside_a_tag(schema) if tagged else Constraint(kind="json_schema", text=json.dumps(schema))
    try:
        text = walk(constraint, seed)
    except BadConstraint:
        return
    validator(schema).validate(json.loads(text.removeprefix("<call>").removesuffix("</call>")))


@given(VALUES)
def test_an_enum_of_a_value_allows_exactly_that(value: object) -> None:
    assert json.loads(schema_walk({"enum": [value]}, 0)) == value


def validator(schema: Any) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema)


def inside_a_tag(schema: Any) -> Constraint:
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}
    return Constraint(kind="structural_tag", text=json.dumps({"type": "structural_tag", "format": tag}))


def schema_walk(schema: dict[str, Any], seed: int) -> str:
    return walk(Constraint(kind="json_schema", text=json.dumps(schema)), seed)


def accepts(schema: dict[str, Any], text: str) -> bool:
    matcher = Matcher(grammars().find(Constraint(kind="json_schema", text=json.dumps(schema))).result())
    return matcher.allowed(tokens := [*encode(text), end_id()]) == len(tokens)
