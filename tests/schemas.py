"""JSON schemas of many kinds that grammars can hold. Texts are short, so that random models come to an end."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
SHORT: Schema = {"type": "string", "maxLength": 3}
DIGIT: Schema = {"type": "integer", "minimum": 0, "maximum": 9}


def thing(closed: bool | None = False, needs: list[str] | None = None, **properties: Any) -> Schema:
    """An object whose properties are all required unless `needs` says which; closed None says nothing of others."""
    found = {"type": "object", "properties": properties, "required": list(properties) if needs is None else needs}
    return found if closed is None else {**found, "additionalProperties": not closed}


def row(items: Any, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


LIST = {
    "$defs": {"node": thing(True, v=DIGIT, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})},
    "$ref": "#/$defs/node",
}
TREE = {
    "$defs": {"tree": thing(True, v=DIGIT, left={"$ref": "#/$defs/side"}, right={"$ref": "#/$defs/side"})}
    | {"side": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
    "$ref": "#/$defs/tree",
}
CIRCLE = thing(True, kind={"const": "circle"}, r=DIGIT)
SQUARE = thing(True, kind={"const": "square"}, a=DIGIT)

SCHEMAS: dict[str, Schema] = {
    # values
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "digit": DIGIT,
    "short": SHORT,
    "two types": {"type": ["boolean", "null"]},
    "types with keywords": {"type": ["string", "integer"], "maxLength": 2, "minimum": 5, "maximum": 7},
    "exact length": {"type": "string", "minLength": 4, "maxLength": 4},
    "at least one letter": {"type": "string", "minLength": 1, "maxLength": 2},
    # numbers with bounds
    "negative": {"type": "integer", "minimum": -20, "maximum": -5},
    "across zero": {"type": "integer", "minimum": -3, "maximum": 12},
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100},
    "hundreds": {"type": "integer", "minimum": 123, "maximum": 789},
    "fraction": {"type": "number", "minimum": 0.25, "maximum": 1.5},
    "open fraction": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "multiples": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50},
    "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
    # enums and constants
    "words": {"enum": ["red", "green", "blue"]},
    "mixed enum": {"enum": ["a", 1, 2.5, None, True]},
    "enum of objects": {"enum": [{"k": [1, 2]}, {"k": []}, []]},
    "enum of a type": {"type": "string", "enum": ["x", "y", 3]},
    "constant": {"const": "only this"},
    "constant object": {"const": {"a": {"b": [None]}}},
    "escapes": {"enum": ['say "hi"', "back\\slash", "new\nline", "tab\t"]},
    "one letter": {"enum": ["a", "ab", "abc"]},
    # patterns and formats
    "pattern": {"type": "string", "pattern": "^[a-f]{2,4}$"},
    "phone": {"type": "string", "pattern": "^\\+[1-9][0-9]{3,5}$"},
    "plate": {"type": "string", "pattern": "^(AB|CD)-[0-9]{3}$"},
    "classes": {"type": "string", "pattern": "^\\d\\w$"},
    "pattern without anchors": {"type": "string", "pattern": "b{1,3}"},
    "date": {"type": "string", "format": "date"},
    "time stamp": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "address": {"type": "string", "format": "ipv4"},
    # arrays
    "digits": row(DIGIT),
    "pairs": row(row(DIGIT, 2, 2), 1, 2),
    "long array": row(DIGIT, 40, 40),
    "long array of words": row({"enum": ["aa", "bb"]}, 20, 30),
    "tuple": {"type": "array", "prefixItems": [DIGIT, SHORT, {"type": "null"}], "items": False, "minItems": 3},
    "tuple and rest": {"type": "array", "prefixItems": [SHORT], "items": DIGIT, "minItems": 1, "maxItems": 3},
    "empty": {"type": "array", "maxItems": 0},
    "things": row(thing(True, id=DIGIT), 1, 3),
    # objects
    "person": thing(True, name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}),
    "optional": thing(True, ["b"], a=DIGIT, b=DIGIT, c=DIGIT),
    "all optional": thing(True, [], a=DIGIT, b=SHORT, c={"type": "boolean"}),
    "says nothing of others": thing(None, a=DIGIT),
    "other numbers": {
        "type": "object",
        "additionalProperties": DIGIT,
        "maxProperties": 2,
        "propertyNames": {"pattern": "^[a-c]$"},
    },
    "names by pattern": {
        "type": "object",
        "patternProperties": {"^[xy]$": DIGIT},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "required but not named": {"type": "object", "required": ["k"], "additionalProperties": DIGIT, "maxProperties": 1},
    "nothing else": {"type": "object", "additionalProperties": False},
    "untyped object": {"properties": {"a": DIGIT}, "required": ["a"], "additionalProperties": False},
    "nested": thing(True, a=thing(True, b=thing(True, c=thing(True, d=thing(True, e=DIGIT))))),
    "nested arrays": thing(True, grid=row(row(row(DIGIT, 1, 2), 1, 2), 1, 2)),
    "wide": thing(True, **{f"field_{i}": DIGIT for i in range(24)}),
    "keys with marks": thing(True, **{'a"b': DIGIT, "c\\d": DIGIT, "e f": DIGIT, "": DIGIT}),
    "inner types": thing(True, s=SHORT, n=DIGIT, b={"type": "boolean"}, z={"type": "null"}, l=row(DIGIT)),
    # unions
    "either": {"anyOf": [DIGIT, SHORT, {"type": "null"}]},
    "either object": {"anyOf": [CIRCLE, SQUARE]},
    "one of by tag": {"oneOf": [CIRCLE, SQUARE]},
    "one of by type": {"oneOf": [DIGIT, {"type": "string", "maxLength": 2}, row(DIGIT)]},
    "optional value": thing(True, a={"anyOf": [DIGIT, {"type": "null"}]}),
    "all of one": {"allOf": [{"type": "integer", "minimum": 2, "maximum": 8}]},
    "type beside branches": {
        "type": "object",
        "anyOf": [
            {"properties": {"a": DIGIT}, "required": ["a"], "additionalProperties": False},
            {"properties": {"b": DIGIT}, "required": ["b"], "additionalProperties": False},
        ],
    },
    "one of by reference": {
        "$defs": {"circle": CIRCLE, "square": SQUARE},
        "type": "array",
        "items": {"oneOf": [{"$ref": "#/$defs/circle"}, {"$ref": "#/$defs/square"}]},
        "minItems": 1,
        "maxItems": 2,
    },
    # references
    "reference": {"$defs": {"d": DIGIT}} | thing(True, a={"$ref": "#/$defs/d"}, b={"$ref": "#/$defs/d"}),
    "definitions": {"definitions": {"d": DIGIT}} | row({"$ref": "#/definitions/d"}, 2, 2),
    "list by one of": {
        "$defs": {"node": thing(True, v=DIGIT, next={"oneOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})},
        "$ref": "#/$defs/node",
    },
    "reference to a property": thing(True, a=DIGIT, b={"$ref": "#/properties/a"}),
    "linked list": LIST,
    "tree": TREE,
    # unicode
    "unicode words": {"enum": ["да", "нет", "也许", "😀😀"]},
    "unicode keys": thing(True, **{"имя": {"enum": ["Аня", "Олег"]}, "城市": {"enum": ["北京", "上海"]}}),
    "unicode pattern": {"type": "string", "pattern": "^[\u0430-\u0433]{1,3}$"},
    "unicode constant": {"const": "naïve café ☕"},
    # as people write them
    "annotated": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Order",
        "description": "What was ordered",
        "type": "object",
        "properties": {
            "id": {"type": "integer", "description": "a number", "minimum": 1, "maximum": 999, "examples": [7]},
            "state": {"type": "string", "enum": ["new", "paid", "sent"], "default": "new"},
        },
        "required": ["id", "state"],
        "additionalProperties": False,
    },
    "tool call": thing(True, name={"const": "weather"}, arguments=thing(True, city=SHORT, unit={"enum": ["C", "F"]})),
    "told apart": {
        "$defs": {
            "cat": thing(None, [], kind={"const": "cat", "default": "cat", "type": "string"}, lives=DIGIT),
            "dog": thing(
                None, [], kind={"enum": ["dog", "wolf"]}, pack={"type": "array", "items": {"$ref": "#/$defs/dog"}}
            ),
        },
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
    },
    "invoice": thing(
        True,
        number={"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"},
        lines=row(thing(True, item=SHORT, count=DIGIT, price={"type": "number", "minimum": 0, "maximum": 99.5}), 1, 2),
        paid={"type": "boolean"},
        note={"anyOf": [SHORT, {"type": "null"}]},
    ),
}

# -- random ones ---------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "ab", "", 'q"', "é", "\u00800"])
PATTERNS = st.sampled_from(
    ["^a", "b$", "a|b", "^.{2}$", "^[^a]*$", "^\\d\\w$", "^é[a-f]$", "^$", "x*", "^a(^b|c)$", "(^a$)|^b$"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, -2.25, 1e20]) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)
_COUNTS = st.integers(0, 3)
_BOUNDS = st.integers(-120, 120) | st.sampled_from([0.5, -0.25, 99.75, 1e3, 0.001, -0.0, 1e-7, 1e-6, 0.4999995])
_STRINGS = st.fixed_dictionaries(
    {"type": st.just("string")}, optional={"minLength": _COUNTS, "maxLength": _COUNTS, "pattern": PATTERNS}
)
_LIMITS = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _BOUNDS)
_NUMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional={**_LIMITS, "multipleOf": st.sampled_from([1, 2, 3, 7, 0.5])},
)
_LEAVES = (
    st.sampled_from([{"type": "null"}, {"type": ["boolean", "null"]}, {}, True, False])
    | _STRINGS
    | _NUMBERS
    | st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=3)})
    | st.fixed_dictionaries({"const": VALUES})
)


def _with(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas that hold these."""
    some = st.lists(inner, min_size=1, max_size=3)
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={"items": inner, "prefixItems": some, "minItems": _COUNTS, "maxItems": _COUNTS},
    )
    objects = st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=3),
            "required": st.lists(NAMES, max_size=2),
            "additionalProperties": inner | st.just(False),
            "patternProperties": st.dictionaries(PATTERNS, inner, min_size=1, max_size=2),
            "propertyNames": _STRINGS,
            "minProperties": _COUNTS,
            "maxProperties": _COUNTS,
        },
    )
    return arrays | objects | objects | st.dictionaries(st.sampled_from(["anyOf", "oneOf", "allOf"]), some, max_size=1)


ANY = st.recursive(_LEAVES, _with, max_leaves=8)
"""Of which a grammar can hold some."""
