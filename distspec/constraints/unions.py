"""Branches of a schema: where references lead, and the property by which objects are told apart.

Knows JSON Schema, and OpenAPI's `discriminator`. Does not know grammars, or what they can hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

_MOST_REFERENCES = 32
"""In a row, from one to the next."""
_VALUES = ("const", "enum")


def resolved(schema: object, root: object) -> Any:
    """What a schema refers to, if it is a reference into its document."""
    seen = 0
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and seen < _MOST_REFERENCES:
        found: Any = root
        for part in schema["$ref"].removeprefix("#").strip("/").split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if name and isinstance(found, Mapping) else found
        schema, seen = found, seen + 1
    return schema


def discriminated(root: object) -> Any:
    """The same schema, where each branch of a `oneOf` with a discriminator requires that property. Pydantic leaves it
    open where it has a default, and then an object without it would be of several branches."""
    root = deepcopy(root)
    for union in [*_unions(root)]:
        name = union["discriminator"].get("propertyName")
        for branch in union["oneOf"]:
            found = resolved(branch, root)
            if isinstance(found, dict) and _has(found, name):
                found["required"] = list(dict.fromkeys([*found.get("required", []), name]))
    return root


def _has(schema: Mapping[str, Any], name: object) -> bool:
    """Whether it is of objects that may have such a property, as far as it is written rightly."""
    properties, required = schema.get("properties"), schema.get("required", [])
    return isinstance(properties, Mapping) and name in properties and isinstance(required, list)


def _unions(schema: Any) -> Iterator[dict[str, Any]]:
    """All that have branches and a discriminator."""
    if isinstance(schema, list):
        for item in schema:
            yield from _unions(item)
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("oneOf"), list) and isinstance(schema.get("discriminator"), Mapping):
        yield schema
    for name, item in schema.items():
        if name not in _VALUES:
            yield from _unions(item)
