"""Tools that a chat offers, and calls of them that it asks for or leaves to the model: as a constraint, and as what
reads them from the answer.

Knows OpenAI's JSON of tools. Does not know templates, grammars or streams.

A call that is asked for (`tool_choice` "required", or one named function) is made by constraint: its arguments are what
the function's `parameters` say. Where the model is free to call ("auto"), its calls are found in its text, in the style
that the server is told; if a tool is `strict`, a structural tag holds those that begin to what their functions say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from distspec.errors import InvalidField
from distspec.protocol.values import Constraint
from distspec.serving.calls import HERMES, LIST, LLAMA3_JSON, Calls, Named, Plain, Reader, Style
from distspec.serving.limits import of_type, valid_text
from distspec.serving.schema import ChatRequest

_NAME = '{"name": '
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "enum", "default", "examples")
STYLES: dict[str, Style] = {"hermes": HERMES, "llama3_json": LLAMA3_JSON}
"""By the name of server.tool_call_parser, which is that of vLLM's."""


@dataclass(frozen=True, slots=True)
class Choice:
    """tool_choice: "none", "auto", "required" or "named" (the tool of this name), among these tools.

    parallel: an answer may hold several calls.
    """

    kind: Literal["none", "auto", "required", "named"]
    tools: Sequence[Mapping[str, Any]] = ()
    named: str = ""
    parallel: bool = True

    @property
    def functions(self) -> dict[str, Mapping[str, Any]]:
        """Those of the tools, by name."""
        return {tool["function"]["name"]: tool["function"] for tool in self.tools}

    def reader(self, parser: str | None) -> Callable[[], Reader]:
        """Makes what reads an answer. parser: the style in which the model calls of its own accord; without one, such
        an answer is text."""
        functions = self.functions
        if self.kind == "named":
            return lambda: Named(self.named)
        if self.kind == "required":
            return lambda: Calls(LIST, functions)
        if self.kind == "auto" and parser is not None:
            return lambda: Calls(STYLES[parser], functions, None if self.parallel else 1)
        return Plain

    def constraint(self, parser: str | None) -> Constraint | None:
        """That the answer is the calls that are asked for, or that those in it are what strict functions say."""
        if self.kind == "named":
            return Constraint(kind="json_schema", text=json.dumps(_parameters(self.functions[self.named])))
        if self.kind == "required":
            return Constraint(kind="json_schema", text=json.dumps(self._list()))
        strict = any(function.get("strict") for function in self.functions.values())
        if self.kind == "auto" and parser is not None and strict:
            return Constraint(kind="structural_tag", text=json.dumps(self._tags(STYLES[parser])))
        return None

    def _list(self) -> dict[str, Any]:
        """Schema of a list of calls, of any of the functions."""
        schemas = {name: _parameters(function) for name, function in self.functions.items()}
        return {
            "$defs": {name: _moved(schema, f"#/$defs/{_pointer(name)}") for name, schema in schemas.items()},
            "type": "array",
            "items": {"anyOf": [_named(name, f"#/$defs/{_pointer(name)}") for name in schemas]},
            "minItems": 1,
            **({} if self.parallel else {"maxItems": 1}),
        }

    def _tags(self, style: Style) -> dict[str, Any]:
        """Free text, in which whatever begins as a call goes on as one. As in vLLM, only the arguments of functions
        that are strict are held to their schema."""
        tags = [
            {
                "begin": f"{style.begin}{style.gap}{_head(name, style)}",
                "content": {
                    "type": "json_schema",
                    "json_schema": _parameters(function) if function.get("strict") else {"type": "object"},
                },
                "end": f"}}{style.gap}{style.end}",
            }
            for name, function in self.functions.items()
        ]
        triggered = {
            "type": "triggered_tags",
            "triggers": [style.begin or _NAME],
            "tags": tags,
            "stop_after_first": not self.parallel,
        }
        return {"type": "structural_tag", "format": triggered}


NO_TOOLS = Choice("none")
"""Of a request that is no chat."""


def choice(request: ChatRequest) -> Choice:
    """Of tools that are looked into here, once. Raises InvalidField for one that is none, or is not there."""
    tools = _offered(request.tools)
    parallel = request.parallel_tool_calls in (None, True)
    asked = request.tool_choice
    if asked is None or asked == "auto":
        return Choice("auto", tools, parallel=parallel)
    if asked == "none":
        return Choice("none", tools)
    if not tools:
        raise InvalidField("tool_choice", asked, "tools to choose from")
    if asked == "required":
        return Choice("required", tools, parallel=parallel)
    is_function = isinstance(asked, Mapping) and asked.get("type", "function") == "function"
    function = asked.get("function") if is_function else None
    name = function.get("name") if isinstance(function, Mapping) else None
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise InvalidField("tool_choice", asked, f"none, auto, required, or a function of {', '.join(names)}")
    return Choice("named", tools, named=str(name))


def _offered(tools: Any) -> list[dict[str, Any]]:
    """Raises InvalidField."""
    if not isinstance(tools, Sequence | None) or isinstance(tools, str):
        raise InvalidField("tools", tools, "a list of tools")
    found = list[dict[str, Any]]()
    names = set[str]()
    for i, tool in enumerate(tools or ()):
        where = f"tools[{i}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise InvalidField(where, tool, 'an object of type "function"')
        function = tool.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidField(f"{where}.function", function, "an object with a name")
        if function["name"] in names:
            raise InvalidField(f"{where}.function.name", function["name"], "a name that no other tool has")
        names.add(function["name"])
        of_type(f"{where}.function.parameters", function.get("parameters"), Mapping, "a JSON schema")
        of_type(f"{where}.function.description", function.get("description"), str, "a string")
        of_type(f"{where}.function.strict", function.get("strict"), bool, "a boolean")
        valid_text(where, json.dumps(tool, ensure_ascii=False))
        found.append(dict(tool))
    return found


def _head(name: str, style: Style) -> str:
    """A call up to its arguments."""
    return f'{_NAME}{json.dumps(name, ensure_ascii=False)}, "{style.arguments}": '


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of a function's arguments; parameters that say nothing are none. A name of its own it loses, since it may
    become a part of another."""
    found = {name: value for name, value in (function.get("parameters") or {}).items() if name != "$id"}
    return found or {"type": "object", "properties": {}}


def _named(name: str, arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": arguments}},
        "required": ["name", "arguments"],
    }


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references lead to where its root is now. What looks like one in a value, or is the name of a
    property, is none."""
    if isinstance(schema, list):
        return [_moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = dict[str, Any]()
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            moved[name] = {key: _moved(item, to) for key, item in value.items()}
        elif name == "$ref" and isinstance(value, str) and f"{value}/".startswith("#/"):
            moved[name] = to + value.removeprefix("#")
        else:
            moved[name] = value if name in _VALUES else _moved(value, to)
    return moved


def _pointer(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
