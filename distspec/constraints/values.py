"""JSON values: of which type they are, and which of them a grammar can spell.

Knows JSON Schema's types. Does not know schemas or grammars.
"""

from __future__ import annotations

from collections.abc import Mapping

from distspec.errors import BadConstraint

LEAST, MOST = -(2**63), 2**63 - 1
"""Of the integers that xgrammar reads as such; others it spells as the floats that are nearest."""


def refused(at: str, name: str, why: str) -> BadConstraint:
    """at: the path to a schema, with a dot behind it; name: the keyword."""
    return BadConstraint(f"{at}{name}: {why}")


def is_a(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    types = {"string": str, "number": int | float, "null": type(None), "array": list, "object": dict}
    return kind in types and isinstance(value, types[kind])


def is_spelled(value: object) -> bool:
    """Whether a grammar can hold a text to this very value."""
    if isinstance(value, Mapping):
        return all(map(is_spelled, value.values()))
    if isinstance(value, list):
        return all(map(is_spelled, value))
    return not isinstance(value, int) or LEAST <= value <= MOST
