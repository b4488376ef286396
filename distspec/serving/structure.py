"""What a request says of the form of its answer, as one constraint.

Knows the fields response_format, structured_outputs, tools and tool_choice. Does not know grammars, or whether a
constraint can be compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from distspec.constraints import choice_grammar
from distspec.errors import InvalidField
from distspec.protocol.values import Constraint
from distspec.serving.limits import of_type, valid_text
from distspec.serving.schema import GenerationRequest
from distspec.serving.tools import NO_TOOLS, Choice

MAX_CONSTRAINT = 1 << 18
"""Characters of a constraint: it travels to each worker of a request."""
FORMATS = ("text", "json_object", "json_schema", "structural_tag")
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Of structured_outputs, as in vLLM."""
HARMLESS = ("disable_any_whitespace", "disable_fallback")
"""Of vLLM, that change nothing: no white space is written, and no other library takes what the first refuses."""
NEUTRAL = ("disable_additional_properties",)
"""Of vLLM, that change nothing if they are false."""
INNER = ("name", "description", "strict", "schema")
"""Of response_format.json_schema, as OpenAI has them."""


class Asked(Struct, frozen=True):
    """A constraint and the field that asks for it."""

    field: str
    constraint: Constraint


def asked(request: GenerationRequest, choice: Choice = NO_TOOLS, parser: str | None = None) -> Asked | None:
    """The one constraint of a request; None if its answer is free. choice: of its tools; parser: see Choice. Raises
    InvalidField."""
    calls = choice.constraint(parser)
    field = "tools" if choice.kind == "auto" else "tool_choice"
    forms = _response_format(request), _structured_outputs(request), Asked(field, calls) if calls else None
    found = [one for one in forms if one is not None]
    if len(found) > 1:
        raise InvalidField(found[1].field, found[1].constraint.kind, f"one constraint at most, beside {found[0].field}")
    for one in found:
        if len(one.constraint.text) > MAX_CONSTRAINT:
            raise InvalidField(one.field, len(one.constraint.text), f"at most {MAX_CONSTRAINT} characters")
        valid_text(one.field, one.constraint.text)
    return found[0] if found else None


def _response_format(request: GenerationRequest) -> Asked | None:
    """As OpenAI has it. Every schema is held to, `strict` or not."""
    value, field = request.response_format, "response_format"
    if value is None:
        return None
    kind = _mapping(field, value).get("type")
    if kind not in FORMATS:
        raise InvalidField(f"{field}.type", kind, f"one of {', '.join(FORMATS)}")
    if kind != "structural_tag":  # a tag's own fields are the grammar's to know
        _only(field, value, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "text":
        return None
    if kind == "json_object":
        return Asked(field, Constraint(kind="json_object"))
    if kind == "structural_tag":
        return Asked(field, Constraint(kind="structural_tag", text=json.dumps(value)))
    inner = _mapping(f"{field}.json_schema", value.get("json_schema"))
    _only(f"{field}.json_schema", inner, INNER)
    for name, of, need in (("name", str, "a string"), ("description", str, "a string"), ("strict", bool, "a boolean")):
        of_type(f"{field}.json_schema.{name}", inner.get(name), of, need)
    return Asked(f"{field}.json_schema.schema", _json_schema(f"{field}.json_schema.schema", inner.get("schema")))


def _structured_outputs(request: GenerationRequest) -> Asked | None:
    value, field = request.structured_outputs, "structured_outputs"
    if value is None:
        return None
    given = {name: item for name, item in _mapping(field, value).items() if item is not None}
    for name in given.keys() & {*HARMLESS, *NEUTRAL}:
        of_type(f"{field}.{name}", given[name], bool, "a boolean")
        if name in HARMLESS or not given[name]:
            del given[name]
    if not given:
        return None
    _only(field, given, KINDS)
    if len(given) > 1:
        raise InvalidField(field, sorted(given), "one constraint at most")
    [(name, item)] = given.items()
    where = f"{field}.{name}"
    if name == "json":
        return Asked(where, _json_schema(where, item))
    if name == "json_object":
        if not isinstance(item, bool):
            raise InvalidField(where, item, "a boolean")
        return Asked(where, Constraint(kind="json_object")) if item else None
    if name == "choice":
        return Asked(where, Constraint(kind="grammar", text=choice_grammar(_choices(where, item))))
    if name == "structural_tag" and isinstance(item, Mapping):
        item = json.dumps(item)
    if not isinstance(item, str) or not item:
        raise InvalidField(where, item, "a string that is not empty")
    return Asked(where, Constraint(kind=name, text=item))


def _json_schema(field: str, schema: object) -> Constraint:
    """A schema, or its JSON."""
    if isinstance(schema, str):
        return Constraint(kind="json_schema", text=schema)
    if not isinstance(schema, Mapping | bool):
        raise InvalidField(field, schema, "a JSON schema")
    return Constraint(kind="json_schema", text=json.dumps(schema))


def _choices(field: str, choices: object) -> Sequence[str]:
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
        raise InvalidField(field, choices, "a list of strings")
    for i, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise InvalidField(f"{field}[{i}]", choice, "a string that is not empty")
    return choices


def _only(field: str, value: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse what would be ignored; null is as if it were not there."""
    for name, item in value.items():
        if name not in names and item is not None:
            raise InvalidField(f"{field}.{name}", item, f"nothing; it is no field of ours ({', '.join(names)})")


def _mapping(field: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidField(field, value, "an object")
    return value
