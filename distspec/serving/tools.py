"""Tools that a chat offers, and calls of them that it asks for: as a constraint, and back from the text.

Knows OpenAI's JSON of tools. Does not know templates, grammars or streams.

A call that is asked for (`tool_choice` "required", or one named function) is made by constraint: its arguments are what
the function's parameters say. Where the model is free to choose, its answer is text, whatever it holds.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distspec.errors import InvalidField
from distspec.protocol.values import Constraint
from distspec.serving.limits import valid_text
from distspec.serving.schema import ChatRequest, GenerationRequest


@dataclass(frozen=True, slots=True)
class Forced:
    """The answer is calls of tools: of `named` alone, whose arguments it is, or (None) a list of name and arguments."""

    named: str | None

    def calls(self, text: str) -> list[dict[str, Any]] | None:
        """tool_calls of a whole answer; None if it was cut before it could be read."""
        if self.named is not None:
            return [_call(self.named, text)]
        try:
            return [_call(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in json.loads(text)]
        except ValueError:
            return None

    @property
    def reason(self) -> str:
        """finish_reason of an answer that was not cut, as OpenAI has it."""
        return "tool_calls" if self.named is None else "stop"


def offered(request: GenerationRequest) -> list[dict[str, Any]]:
    """The tools of a chat, for its template. Raises InvalidField."""
    tools = request.tools if isinstance(request, ChatRequest) else None
    if not isinstance(tools, Sequence | None) or isinstance(tools, str):
        raise InvalidField("tools", tools, "a list of tools")
    for i, tool in enumerate(tools or ()):
        where = f"tools[{i}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise InvalidField(where, tool, 'an object of type "function"')
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidField(f"{where}.function", function, "an object with a name")
        if not isinstance(function.get("parameters", {}), Mapping):
            raise InvalidField(f"{where}.function.parameters", function["parameters"], "a JSON schema")
        valid_text(where, json.dumps(tool, ensure_ascii=False))
    return [dict(tool) for tool in tools or ()]


def forced(request: GenerationRequest) -> Forced | None:
    """Raises InvalidField for a choice among tools that there are not."""
    choice = request.tool_choice if isinstance(request, ChatRequest) else None
    if choice is None or choice in ("none", "auto"):
        return None
    names = [tool["function"]["name"] for tool in offered(request)]
    if not names:
        raise InvalidField("tool_choice", choice, "tools to choose from")
    if choice == "required":
        return Forced(None)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise InvalidField("tool_choice", choice, f"none, auto, required, or a function of {', '.join(names)}")
    return Forced(name)


def constraint(request: GenerationRequest) -> Constraint | None:
    """That the answer is the calls that are asked for, if any."""
    found = forced(request)
    if found is None:
        return None
    assert isinstance(request, ChatRequest)
    functions = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in offered(request)}
    if found.named is not None:
        return Constraint(kind="json_schema", text=json.dumps(_object(functions[found.named])))
    calls = [_named(name, f"#/$defs/{_pointer(name)}") for name in functions]
    most = {} if request.parallel_tool_calls in (None, True) else {"maxItems": 1}
    schema = {
        "$defs": {name: _moved(_object(schema), f"#/$defs/{_pointer(name)}") for name, schema in functions.items()},
        "type": "array",
        "items": {"anyOf": calls},
        "minItems": 1,
        **most,
    }
    return Constraint(kind="json_schema", text=json.dumps(schema))


def _object(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that say nothing are none."""
    return dict(parameters) or {"type": "object", "properties": {}}


def _named(name: str, arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": arguments}},
        "required": ["name", "arguments"],
    }


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references lead to where its root is now."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(item, to) for name, item in schema.items()}
    if isinstance(schema.get("$ref"), str):
        moved["$ref"] = to + schema["$ref"].removeprefix("#")
    return moved


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
