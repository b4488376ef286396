"""JSON schemas that a grammar can hold: what xgrammar would read too widely is made exact, or refused.

Knows JSON Schema (draft 2020-12) and where xgrammar's grammars allow more than it. Does not know grammars, tokens or
requests.

A grammar may allow less than its schema (one order of properties, no white space), never more: what comes out must
validate. So keywords that xgrammar ignores, alone or beside others, are an error that names them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distspec.constraints.formats import PATTERNS
from distspec.constraints.numbers import exact_number
from distspec.constraints.patterns import common, needs_escapes, none_of
from distspec.constraints.unions import discriminated, resolved
from distspec.constraints.values import is_a, is_spelled, refused
from distspec.errors import BadConstraint

Schema = dict[str, Any]

_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"},
    "object": {
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    },
}
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords beside which xgrammar looks at nothing else."""

_UNSUPPORTED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "dependentRequired"),
    *("dependentSchemas", "dependencies", "additionalItems", "$dynamicRef", "$recursiveRef"),
)
_CONSTRAINING = {*_WHOLE, "type", *(name for names in _OF_TYPE.values() for name in names)}
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_ADDITIONAL = ("additionalProperties", "unevaluatedProperties")
_ITEMS = {"items", "prefixItems", "unevaluatedItems"}
_PROPERTIES = {"properties", "patternProperties", "propertyNames", *_ADDITIONAL}
"""What says of which an array or an object is; without any of these, of whatever there is."""
_LONGEST_NAME = 500
"""Of a property that others are told from, by an expression that nests as deep."""
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")


def exact(schema: object, keeps_strings: Callable[[str], bool] = lambda pattern: True) -> bool | Schema:
    """The same schema, or one that allows less, as xgrammar reads it to the letter.

    keeps_strings: whether a pattern only matches what may stand between quotes as it is. Raises BadConstraint that
    names the keyword where there is no such schema.
    """
    try:
        schema = discriminated(schema)
        return _exact(schema, "", _Document(schema, keeps_strings))
    except RecursionError:
        raise BadConstraint("nested too deeply") from None


@dataclass(frozen=True, slots=True)
class _Document:
    """root: what references lead into. keeps_strings: see exact."""

    root: object
    keeps_strings: Callable[[str], bool]


def _exact(schema: object, at: str, document: _Document) -> bool | Schema:
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping):
        raise BadConstraint(f"{at.rstrip('.') or 'schema'}: need an object or a boolean")
    for name in _UNSUPPORTED:
        if name in schema:
            raise refused(at, name, "not supported")
    if schema.get("uniqueItems"):
        raise refused(at, "uniqueItems", "not supported")
    if at and "$id" in schema:
        raise refused(at, "$id", "only supported at the root, since references within it would begin here")
    found = _constraining({name: value for name, value in schema.items() if name in _CONSTRAINING}, at, document)
    for name in ("$defs", "definitions"):
        if name in schema:
            found[name] = _exact_each(schema[name], at, name, document)
    return found


def _constraining(schema: Schema, at: str, document: _Document) -> Schema:
    whole = [name for name in _WHOLE if name in schema]
    if not whole:
        return _typed(schema, at, document)
    name, others = whole[0], schema.keys() - {whole[0], "type"}
    if others or (name == "$ref" and "type" in schema):
        beside = min(others or {"type"})
        raise refused(at, beside, f"not supported beside {name}")
    if name == "$ref":
        if not isinstance(schema[name], str) or not f"{schema[name]}/".startswith("#/"):
            raise refused(at, name, "only supported as #, or from there on by a path, as #/$defs/name")
        return schema
    if name in ("const", "enum"):
        return _values(schema, at)
    return _branches(schema, name, at, document)


def _values(schema: Schema, at: str) -> Schema:
    """An enum of the values that are of the type that stands beside it."""
    name = "const" if "const" in schema else "enum"
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise refused(at, "enum", "need a list of values")
    types = _types(schema, at)
    fitting = [value for value in values if types is None or any(is_a(value, kind) for kind in types)]
    if not fitting:
        raise refused(at, name, "need a value" + (f" of type {schema['type']}" if types else ""))
    if not is_spelled(fitting):
        raise refused(at, name, "holds an integer of more than 64 bits")
    return {"enum": fitting}


def _branches(schema: Schema, name: str, at: str, document: _Document) -> Schema:
    options = schema[name]
    if not isinstance(options, Sequence) or isinstance(options, str) or not options:
        raise refused(at, name, "need a list of schemas")
    if name == "allOf" and len(options) > 1:
        raise refused(at, name, "only one schema is supported; write what they say together as one")
    if "type" in schema:
        options = [_with_type(option, schema["type"], f"{at}{name}.") for option in options]
    branches = [_exact(option, f"{at}{name}[{i}].", document) for i, option in enumerate(options)]
    if name == "oneOf":
        for i, one in enumerate(options):
            for j, other in enumerate(options[:i]):
                if not _are_disjoint(one, other, document):
                    need = "may both hold; use anyOf, or give them different types, or a required property each of"
                    raise refused(at, name, f"branches {j} and {i} {need} whose values differ")
    return {"allOf" if name == "allOf" else "anyOf": branches}


def _with_type(option: object, kind: object, at: str) -> object:
    """A branch that says the type which stands beside the branches."""
    if not isinstance(option, Mapping):
        return {"type": kind} if option is True else option
    if option.get("type", kind) != kind or any(name in option for name in _WHOLE if name not in ("const", "enum")):
        raise refused(at, "type", "say it in each branch, not beside them")
    return {"type": kind, **option}


def _typed(schema: Schema, at: str, document: _Document) -> Schema:
    types = _types(schema, at)
    if types is None:
        families = [kind for kind, names in _OF_TYPE.items() if names & schema.keys()]
        if len(families) > 1:
            raise refused(at, "type", f"missing, where there are keywords of {' and '.join(families)}")
        if not families:
            return schema
        types, schema = families, {"type": families[0], **schema}
    if len(types) > 1:
        # One branch each, with the keywords of its own type.
        return {"anyOf": [_typed({**schema, "type": kind}, at, document) for kind in types]}
    kind = _family(types[0])
    schema = {name: value for name, value in schema.items() if name == "type" or name in _OF_TYPE.get(kind, ())}
    for name in _COUNTS:
        if name in schema:
            schema[name] = _count(schema[name], at, name)
    if kind == "string":
        return _string(schema, at, document)
    if kind == "array":
        return _array(schema, at, document)
    if kind == "number":
        return exact_number(schema, at)
    return _object(schema, at, document) if kind == "object" else schema


def _count(value: Any, at: str, name: str) -> int:
    if not is_a(value, "integer") or value < 0:
        raise refused(at, name, "need a whole number, 0 or more")
    return int(value)


def _string(schema: Schema, at: str, document: _Document) -> Schema:
    if "pattern" in schema:
        schema["pattern"] = _pattern(schema["pattern"], f"{at}pattern", document)
        for name in ("minLength", "maxLength"):
            if name in schema:
                raise refused(at, name, "not supported beside pattern; say it in the pattern")
    if not isinstance(schema.get("format", ""), str):
        raise refused(at, "format", "need a name")
    if len(schema) > 2:
        schema.pop("format", None)  # a remark by the standard, which xgrammar would take in place of the others
    elif schema.get("format") in PATTERNS:
        schema = {"type": "string", "pattern": _pattern(PATTERNS[schema["format"]], f"{at}format", document)}
    return schema


def _pattern(pattern: object, at: str, document: _Document) -> str:
    """As all read it."""
    if not isinstance(pattern, str):
        raise refused(at, "", "need an expression")
    try:
        found = common(pattern)
    except BadConstraint as error:
        raise refused(at, "", str(error)) from None
    if needs_escapes(pattern) or not document.keeps_strings(found):
        raise refused(at, "", "matches characters that JSON must escape")
    return found


def _array(schema: Schema, at: str, document: _Document) -> Schema:
    if not schema.keys() & _ITEMS:
        schema["items"] = True  # or beside a count xgrammar would allow none
    for name in ("items", "unevaluatedItems"):
        if name in schema:
            schema[name] = _exact(schema[name], f"{at}{name}.", document)
    if "prefixItems" in schema:
        items = schema["prefixItems"]
        if not isinstance(items, Sequence) or isinstance(items, str):
            raise refused(at, "prefixItems", "need a list of schemas")
        schema["prefixItems"] = [_exact(item, f"{at}prefixItems[{i}].", document) for i, item in enumerate(items)]
    return schema


def _object(schema: Schema, at: str, document: _Document) -> Schema:
    """Every property that is required is one that is named, since xgrammar asks for no others."""
    if not schema.keys() & _PROPERTIES:
        schema["additionalProperties"] = True  # or beside a count, or `required`, xgrammar would allow none
    for name in ("properties", "patternProperties"):
        if name in schema:
            schema[name] = _exact_each(schema[name], at, name, document)
    for name in (*_ADDITIONAL, "propertyNames"):
        if name in schema:
            schema[name] = _exact(schema[name], f"{at}{name}.", document)
    _check_names(schema, at)
    if "patternProperties" in schema:
        patterns = schema["patternProperties"].items()
        where = f"{at}patternProperties"
        schema["patternProperties"] = {_pattern(name, f"{where}.{name}", document): value for name, value in patterns}
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise refused(at, "required", "need a list of names")
    named = schema.get("properties", {})
    others = _others(schema)
    missing = [name for name in required if name not in named]
    if missing:
        if others is False or "patternProperties" in schema or "propertyNames" in schema:
            raise refused(at, "required", f"{missing[0]!r} is not among properties")
        schema["properties"] = named | dict.fromkeys(missing, {} if others is True else others)
    free = "properties" not in schema or schema.get("additionalProperties", False) is not False
    if (free or "patternProperties" in schema) and schema.get("minProperties", 0) > len(required):
        raise refused(at, "minProperties", "above the required properties, only where additionalProperties is false")
    if schema.get("properties") and _others(schema) is not False and schema.keys() & set(_ADDITIONAL):
        return _apart(schema, at, document)
    return schema


def _apart(schema: Schema, at: str, document: _Document) -> Schema:
    """The same object, whose other properties have names that no other spells, and no escapes: xgrammar lets names that
    are listed come again as others, with an escape, or where one of them is not ASCII."""
    plain = [name for name in schema["properties"] if json.dumps(name, ensure_ascii=False) == f'"{name}"']
    if max(map(len, plain), default=0) > _LONGEST_NAME:
        raise refused(at, "additionalProperties", f"not supported beside names of over {_LONGEST_NAME} characters")
    pattern, others = none_of(frozenset(plain)), _others(schema)
    if not document.keeps_strings(pattern):
        raise refused(at, "additionalProperties", "not supported beside these properties")
    kept = {name: value for name, value in schema.items() if name not in _ADDITIONAL}
    return {**kept, "patternProperties": {pattern: others}, "additionalProperties": False}


def _check_names(schema: Schema, at: str) -> None:
    """Names by patterns or by propertyNames are only theirs: xgrammar keeps apart neither these from each other, nor
    from names that are listed, and with propertyNames it forgets that there may be no others."""
    patterns = schema.get("patternProperties", {})
    if patterns and _others(schema) is not False and schema.keys() & set(_ADDITIONAL):
        raise refused(at, "patternProperties", "not supported beside additionalProperties")
    values = list(patterns.values())
    if any(value != values[0] for value in values):
        raise refused(at, "patternProperties", "patterns that say different things are not supported")
    for name in schema.get("properties", {}):
        if any(re.search(pattern, name, flags) for pattern in patterns for flags in (0, re.ASCII)):
            raise refused(at, "patternProperties", f"matches {name!r}, which is among properties")
    if "propertyNames" in schema and (patterns or "properties" in schema or _others(schema) is False):
        raise refused(at, "propertyNames", "only supported without properties, and where others may be")


def _others(schema: Schema) -> Any:
    """What properties that are not named may be, as a schema."""
    return schema.get("additionalProperties", schema.get("unevaluatedProperties", True))


def _are_disjoint(one: object, other: object, document: _Document) -> bool:
    """Whether it is plain that no value is of both. Schemas as they were written."""
    one, other = resolved(one, document.root), resolved(other, document.root)
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return False
    kinds, others = _kinds(one), _kinds(other)
    if kinds is not None and others is not None and not kinds & others:
        return True
    values, others_values = _listed(one), _listed(other)
    if values is not None and others_values is not None:
        return not any(value == found for value in values for found in others_values)
    if kinds != {"object"} or others != {"object"} or values is not None or others_values is not None:
        return False
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    pairs = (
        [resolved(side.get("properties", {}).get(name), document.root) for side in (one, other)] for name in shared
    )
    return any(_listed(a) is not None and _listed(b) is not None and _are_disjoint(a, b, document) for a, b in pairs)


def _listed(schema: object) -> list[object] | None:
    """The values that a schema lists."""
    if not isinstance(schema, Mapping):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _kinds(schema: Mapping[str, Any]) -> set[str] | None:
    """Types of a schema, an integer being a number; None if any, or if that is not plain."""
    values = _listed(schema)
    if values is not None:
        return {next(kind for kind in _TYPES if is_a(value, kind)) for value in values}
    kinds = schema.get("type")
    if kinds is None:
        families = {kind for kind, names in _OF_TYPE.items() if names & schema.keys()}
        return families if len(families) == 1 else None
    return {_family(kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)}


def _types(schema: Schema, at: str) -> list[str] | None:
    kinds = schema.get("type")
    if kinds is None:
        return None
    found = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(found, list) or not found or not all(kind in _TYPES for kind in found):
        raise refused(at, "type", f"need one or more of {', '.join(_TYPES)}")
    return found


def _family(kind: str) -> str:
    return "number" if kind == "integer" else kind


def _exact_each(schemas: object, at: str, name: str, document: _Document) -> Schema:
    """Schemas by name: the value of properties, $defs and the like."""
    if not isinstance(schemas, Mapping):
        raise refused(at, name, "need an object")
    return {key: _exact(schema, f"{at}{name}.{key}.", document) for key, schema in schemas.items()}
