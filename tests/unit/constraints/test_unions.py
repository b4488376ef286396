"""Branches with a discriminator are told apart by it, and nothing else of a schema changes."""

from __future__ import annotations

from copy import deepcopy
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from distspec.constraints.schema import exact
from distspec.constraints.unions import discriminated, resolved
from distspec.errors import BadConstraint
from tests.schemas import DIGIT


class Number(BaseModel):
    kind: Literal["number"] = "number"
    value: int


class Sum(BaseModel):
    kind: Literal["sum"] = "sum"
    parts: list[Annotated[Number | Sum, Field(discriminator="kind")]]


def test_a_property_with_a_default_is_required_where_branches_are_told_apart_by_it() -> None:
    schema = Sum.model_json_schema()
    before = deepcopy(schema)
    with pytest.raises(BadConstraint, match="oneOf"):
        exact(_without_discriminators(schema))
    found = discriminated(schema)
    assert schema == before
    for name in ("Number", "Sum"):
        own = resolved({"$ref": f"#/$defs/{name}"}, found)
        assert set(own.pop("required")) == {"kind", *schema["$defs"][name].pop("required")}
        assert own == schema["$defs"][name]
    exact(Sum.model_json_schema())


@pytest.mark.parametrize(
    "odd",
    [
        {"oneOf": [{"type": "object", "properties": {"a": DIGIT}, "required": "ab"}]},
        {"oneOf": [{"type": "object", "properties": ["a"]}, True, {"$ref": "#/nowhere"}, DIGIT]},
        {"oneOf": "a"},
        {"const": {"oneOf": [{"properties": {"a": {}}}], "discriminator": {"propertyName": "a"}}},
        {"type": "object", "properties": {"oneOf": DIGIT, "discriminator": DIGIT}},
    ],
)
def test_what_is_no_such_union_stays_as_it_is(odd: dict[str, Any]) -> None:
    schema = {"discriminator": {"propertyName": "a"}, **odd}
    assert discriminated(schema) == schema


def _without_discriminators(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_discriminators(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _without_discriminators(item) for name, item in schema.items() if name != "discriminator"}
