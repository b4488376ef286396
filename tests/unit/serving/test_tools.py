"""Tools: a call that is asked for is a constraint, and comes back as OpenAI's tool_calls, whole or streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from distspec.constraints import Matcher
from distspec.errors import InvalidField
from distspec.serving import prompts, schema, tools
from distspec.serving.http import create_app
from distspec.serving.limits import Limits
from distspec.serving.schema import ChatRequest
from distspec.serving.service import Service
from tests.spelling import encode, end_id, grammars
from tests.unit.serving.conftest import TableClient
from tests.unit.serving.test_http import HealthyFleet

MESSAGES = [{"role": "user", "content": "hi"}]
POINT = {
    "type": "object",
    "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "properties": {"x": {"$ref": "#/$defs/n"}},
    "required": ["x"],
}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


TOOLS = [tool("point", description="a point", parameters=POINT), tool("stop/now")]
NAMED = {"type": "function", "function": {"name": "point"}}


def ask(limits: Limits, **fields: Any) -> ChatRequest:
    return schema.parse(ChatRequest, {"messages": MESSAGES, "tools": TOOLS, **fields}, limits)


def allows(request: ChatRequest, text: str) -> bool:
    found = tools.constraint(request)
    assert found is not None
    tokens = [*encode(text), end_id()]
    return Matcher(grammars().find(found).result()).allowed(tokens) == len(tokens)


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_where_the_model_is_free_nothing_is_constrained(choice: str | None, limits: Limits) -> None:
    assert tools.constraint(ask(limits, tool_choice=choice)) is None
    assert tools.forced(ask(limits, tool_choice=choice)) is None


def test_a_named_call_is_its_arguments(limits: Limits) -> None:
    request = ask(limits, tool_choice=NAMED)
    assert allows(request, '{"x":7}')
    assert not allows(request, '{"x":77}')
    assert not allows(request, '[{"name":"point","arguments":{"x":7}}]')


def test_required_calls_are_a_list_of_any_of_the_tools(limits: Limits) -> None:
    request = ask(limits, tool_choice="required")
    point, stop = '{"name":"point","arguments":{"x":7}}', '{"name":"stop/now","arguments":{}}'
    assert allows(request, f"[{point}]")
    assert allows(request, f"[{stop},{point}]")
    assert not allows(request, "[]")
    assert not allows(request, '[{"name":"point","arguments":{}}]')
    one = ask(limits, tool_choice="required", parallel_tool_calls=False)
    assert allows(one, f"[{stop}]")
    assert not allows(one, f"[{stop},{point}]")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "web"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("a", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    ],
)
async def test_what_is_wrong_is_named(fields: dict[str, Any], field: str, service: Service, limits: Limits) -> None:
    with pytest.raises(InvalidField) as error:
        await service.chat_jobs(ask(limits, **fields))
    assert error.value.field == field


def test_calls_and_their_results_are_turns_of_the_chat(limits: Limits) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "point", "arguments": '{"x": 1}'}}
    said = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c1", "content": "done"}
    found = prompts.turns([*said, result], limits)
    assert found[1]["tool_calls"][0]["function"] == {"name": "point", "arguments": {"x": 1}}
    assert found[2] == result
    call["function"]["arguments"] = "{"  # type: ignore[index]
    with pytest.raises(InvalidField, match="arguments"):
        prompts.turns(said, limits)


@pytest.fixture
def client_of(service: Service) -> openai.AsyncOpenAI:
    app = create_app(service, HealthyFleet())
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)


def say(client: TableClient, service: Service, text: str) -> None:
    """The next answers are this text, and then the end."""
    prompt = service.text.chat(prompts.turns(MESSAGES, service.limits), TOOLS)
    client.answers[prompt] = [*service.text.encode(text), service.text.stop_ids[0]]


LIST = '[{"name":"point","arguments":{"x":7}},{"name":"stop/now","arguments":{}}]'


@pytest.mark.parametrize(
    ("choice", "answer", "calls", "reason"),
    [
        (NAMED, '{"x":7}', [("point", {"x": 7})], "stop"),
        ("required", LIST, [("point", {"x": 7}), ("stop/now", {})], "tool_calls"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_come_back_as_openai_has_them(
    choice: Any,
    answer: str,
    calls: list[tuple[str, Any]],
    reason: str,
    stream: bool,
    client: TableClient,
    service: Service,
    client_of: openai.AsyncOpenAI,
) -> None:
    say(client, service, answer)
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    if stream:
        found, reasons = [], []
        async for chunk in await client_of.chat.completions.create(**asked, max_tokens=150, stream=True):
            reasons.append(chunk.choices[0].finish_reason)
            assert not chunk.choices[0].delta.content
            found += chunk.choices[0].delta.tool_calls or []
        assert reasons[-1] == reason
        assert [call.index for call in found] == list(range(len(calls)))
    else:
        whole = await client_of.chat.completions.create(**asked, max_tokens=150)
        assert (whole.choices[0].finish_reason, whole.choices[0].message.content) == (reason, None)
        found = whole.choices[0].message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in found] == calls
    jsonschema.Draft202012Validator(POINT).validate(json.loads(found[0].function.arguments))


async def test_calls_that_were_cut_say_so(client: TableClient, service: Service, client_of: openai.AsyncOpenAI) -> None:
    say(client, service, LIST)
    found = await client_of.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=9
    )
    assert found.choices[0].finish_reason == "length"
    assert found.choices[0].message.tool_calls is None
    assert LIST.startswith(found.choices[0].message.content)
