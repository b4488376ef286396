"""Tools: a call that is asked for is a constraint, and comes back as OpenAI's tool_calls, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import httpx
import jsonschema
import openai
import pytest

from distspec.config import Server
from distspec.constraints import Matcher
from distspec.errors import BadConstraint, InvalidField
from distspec.protocol.values import Constraint
from distspec.serving import prompts, schema, tools
from distspec.serving.http import create_app
from distspec.serving.limits import Limits
from distspec.serving.schema import ChatRequest
from distspec.serving.service import Service
from distspec.serving.text import Text
from tests.schemas import SCHEMAS
from tests.spelling import encode, end_id, grammars, walk
from tests.unit.serving.conftest import TableClient
from tests.unit.serving.test_http import HealthyFleet
from tests.words import byte_level

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


def allows(request: ChatRequest, text: str, parser: str | None = None) -> bool:
    found = tools.choice(request).constraint(parser)
    assert found is not None
    tokens = [*encode(text), end_id()]
    return Matcher(grammars().find(found).result()).allowed(tokens) == len(tokens)


@pytest.mark.parametrize("choice", [None, "none", "auto"])
@pytest.mark.parametrize("parser", [None, *tools.STYLES])
def test_where_the_model_is_free_nothing_is_constrained(choice: str | None, parser: str | None, limits: Limits) -> None:
    assert tools.choice(ask(limits, tool_choice=choice)).constraint(parser) is None


def test_a_named_call_is_its_arguments(limits: Limits) -> None:
    request = ask(limits, tool_choice=NAMED)
    assert allows(request, '{"x":7}')
    assert not allows(request, '{"x":77}')
    assert not allows(request, '[{"name":"point","arguments":{"x":7}}]')


STRICT = [tool("point", parameters=POINT, strict=True), tool("stop/now"), tool("any", parameters=POINT, strict=False)]


@pytest.mark.parametrize("parser", tools.STYLES)
@pytest.mark.parametrize("choice", [None, "auto"])
def test_calls_that_a_model_begins_are_what_strict_tools_say(parser: str, choice: str | None, limits: Limits) -> None:
    style = tools.STYLES[parser]

    def call(name: str, arguments: str) -> str:
        inner = f'{{"name": "{name}", "{style.arguments}": {arguments}}}'
        return f"{style.begin}{style.gap}{inner}{style.gap}{style.end}"

    request = ask(limits, tools=STRICT, tool_choice=choice)
    assert allows(request, "just text", parser)
    assert allows(request, call("point", '{"x":7}'), parser)
    assert allows(request, call("point", '{"x":7}') + "\n" + call("any", '{"y":[7]}') + "so", parser)
    assert not allows(request, call("point", '{"x":77}'), parser)
    assert not allows(request, call("other", "{}"), parser)
    one = ask(limits, tools=STRICT, parallel_tool_calls=False)
    assert not allows(one, call("point", '{"x":7}') + "\n" + call("any", "{}"), parser)


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


def test_references_of_several_tools_lead_into_their_own(limits: Limits) -> None:
    """What looks like one is none in a value or as the name of a property, and one by an anchor is refused."""
    values = {"const": {"$ref": "#/$defs/n"}}
    odd = POINT | {"$id": "https://example.com", "properties": {"const": {"$ref": "#/$defs/n"}, "x": values}}
    request = ask(
        limits, tools=[tool("5%41 ~", parameters=odd), tool("point", parameters=POINT)], tool_choice="required"
    )
    assert allows(request, '[{"name":"5%41 ~","arguments":{"const":7,"x":{"$ref":"#/$defs/n"}}}]')
    assert not allows(request, '[{"name":"5%41 ~","arguments":{"const":77,"x":{"$ref":"#/$defs/n"}}}]')
    anchored = {"type": "object", "properties": {"x": {"$ref": "#here"}}, "$defs": {"n": {"$anchor": "here"}}}
    with pytest.raises(BadConstraint, match="path"):
        allows(ask(limits, tools=[tool("f", parameters=anchored)], tool_choice="required"), "[]")


OBJECTS = [name for name, schema in SCHEMAS.items() if schema.get("type") == "object"] + ["linked list", "tree"]


@pytest.mark.parametrize("name", OBJECTS)
def test_arguments_are_what_the_function_says_however_the_call_comes(name: str, limits: Limits) -> None:
    """Random answers that the constraint lets through, read as answers are."""
    function = tool("f/1", parameters=SCHEMAS[name], strict=True)
    ways: list[tuple[Any, str | None]] = [({"type": "function", "function": {"name": "f/1"}}, None), ("required", None)]
    for asked, parser in [*ways, *(("auto", parser) for parser in tools.STYLES)]:
        found = tools.choice(ask(limits, tools=[function], tool_choice=asked, parallel_tool_calls=False))
        constraint = found.constraint(parser)
        assert constraint is not None
        said = found.reader(parser)().push(walk(called(constraint), 0), last=True)
        assert {call.name for call in said.calls} == {"f/1"}
        arguments = json.loads("".join(call.arguments for call in said.calls))
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(arguments)


def called(constraint: Constraint) -> Constraint:
    """Of free text with calls, the calls."""
    if constraint.kind != "structural_tag":
        return constraint
    tag = json.loads(constraint.text)
    tag["format"]["at_least_one"] = True
    return Constraint(kind="structural_tag", text=json.dumps(tag))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "web"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool("a"), tool("b"), tool("a")]}, "tools[2].function.name"),
        ({"tools": [tool("a", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool("a", strict="yes")]}, "tools[0].function.strict"),
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


@pytest.fixture(scope="session")
def limits() -> Limits:
    return Limits("tiny", 350, 400, 20, 4, 12, 16, ("ar", "sd"), tool_call_parser="hermes")


@pytest.fixture
def client_of(service: Service) -> openai.AsyncOpenAI:
    return openai_of(service)


def openai_of(service: Service) -> openai.AsyncOpenAI:
    app = create_app(service, HealthyFleet())
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)


def say(client: TableClient, service: Service, text: str) -> None:
    """The next answers are this text, and then the end."""
    said = service.text.render(prompts.turns(MESSAGES, service.limits), TOOLS)
    prompt = service.text.encode(said, add_special_tokens=False)
    client.answers[prompt] = [*service.text.encode(text), service.text.stop_ids[0]]


LIST = '[{"name":"point","arguments":{"x":7}},{"name":"stop/now","arguments":{}}]'
FREE = """I say:
<tool_call>
{"name": "point", "arguments": {"x": 7}}
</tool_call>
<tool_call>
{"name": "stop/now", "arguments": {}}
</tool_call>
"""
BOTH = [("point", {"x": 7}), ("stop/now", {})]


async def told(
    client_of: openai.AsyncOpenAI, *, stream: bool, **asked: Any
) -> tuple[str | None, list[Any], str | None]:
    """Content, calls as (name, arguments), finish_reason."""
    asked = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 190, **asked}
    if not stream:
        [choice] = (await client_of.chat.completions.create(**asked)).choices
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        return choice.message.content, calls, choice.finish_reason
    content = ""
    ids: list[str] = []
    parts: list[tuple[str, list[str]]] = []
    reasons: list[str | None] = []
    async for chunk in await client_of.chat.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        reasons.append(choice.finish_reason)
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or []:
            assert (part.type == "function") == (part.index == len(ids)) == bool(part.function.name)
            if part.id:
                ids.append(part.id)
                parts.append((part.function.name, []))
            parts[part.index][1].append(part.function.arguments)
    assert len(set(ids)) == len(parts)
    assert all(reason is None for reason in reasons[:-1])
    return content or None, [(name, "".join(some)) for name, some in parts], reasons[-1]


@pytest.mark.parametrize(
    ("choice", "answer", "content", "calls", "reason"),
    [
        (NAMED, '{"x":7}', None, BOTH[:1], "stop"),
        ("required", LIST, None, BOTH, "tool_calls"),
        ("auto", FREE, "I say:", BOTH, "tool_calls"),
        (None, FREE[7:], None, BOTH, "tool_calls"),
        (None, "No: <tool_call>", "No: <tool_call>", [], "stop"),
        ("none", FREE, FREE, [], "stop"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_come_back_as_openai_has_them(
    choice: Any,
    answer: str,
    content: str | None,
    calls: list[tuple[str, Any]],
    reason: str,
    stream: bool,
    client: TableClient,
    service: Service,
    client_of: openai.AsyncOpenAI,
) -> None:
    say(client, service, answer)
    found = await told(client_of, stream=stream, tool_choice=choice)
    assert (found[0], [(name, json.loads(arguments)) for name, arguments in found[1]], found[2]) == (
        content,
        calls,
        reason,
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_of_one_call_at_most(
    stream: bool, client: TableClient, service: Service, client_of: openai.AsyncOpenAI
) -> None:
    say(client, service, FREE)
    _, calls, _ = await told(client_of, stream=stream, parallel_tool_calls=False)
    assert [name for name, _ in calls] == ["point"]


async def test_arguments_are_streamed_while_they_are_made(
    client: TableClient, service: Service, client_of: openai.AsyncOpenAI
) -> None:
    say(client, service, FREE)
    asked: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 190, "stream": True}
    first = []
    async for chunk in await client_of.chat.completions.create(**asked):
        first += [part for part in chunk.choices[0].delta.tool_calls or [] if part.index == 0]
    assert first[0].function.name == "point"
    assert len(first) > 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "answer"), [("required", LIST), ("auto", FREE)])
async def test_calls_that_were_cut_are_told_as_far_as_they_came(
    choice: str, answer: str, stream: bool, client: TableClient, service: Service, client_of: openai.AsyncOpenAI
) -> None:
    say(client, service, answer)
    kept = len(service.text.encode(answer[: answer.index("7") + 1]))
    found = await told(client_of, stream=stream, tool_choice=choice, max_tokens=kept)
    assert found[1:] == ([("point", answer[answer.index('{"x"') : answer.index("7") + 1])], "length")


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_echoed_is_content(stream: bool, client: TableClient, limits: Limits) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    service = Service(client, Text(tokenizer), limits)
    messages = [*MESSAGES, {"role": "assistant", "content": "<tool_call> I"}]
    prompt = service.text.encode(service.text.render(prompts.turns(messages, limits), TOOLS), add_special_tokens=False)
    client.answers[prompt] = [*service.text.encode(FREE), service.text.stop_ids[0]]
    found = await told(openai_of(service), stream=stream, messages=messages, extra_body={"echo": True})
    assert (found[0], len(found[1])) == ("<tool_call> II say:", 2)


def test_every_parser_of_the_configuration_is_there() -> None:
    names, _ = get_args(get_type_hints(Server)["tool_call_parser"])
    assert set(get_args(names)) == tools.STYLES.keys()


async def test_strict_tools_constrain_what_the_model_is_free_to_say(
    client: TableClient, service: Service, client_of: openai.AsyncOpenAI
) -> None:
    say(client, service, "no")
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9}
    await client_of.chat.completions.create(**asked, tools=STRICT)
    await client_of.chat.completions.create(**asked, tools=TOOLS)
    strict, free = (params.constraint for _, params, _ in client.submitted)
    assert strict is not None
    assert (strict.kind, free) == ("structural_tag", None)
    bad = [tool("a", strict=True, parameters={"type": "object", "properties": {"x": {"not": {}}}})]
    with pytest.raises(openai.BadRequestError) as error:
        await client_of.chat.completions.create(**asked, tools=bad)
    assert error.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="one constraint"):
        await client_of.chat.completions.create(**asked, tools=STRICT, response_format={"type": "json_object"})


class Looked(list[Any]):
    """Counts how often it is gone through."""

    times = 0

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        return super().__iter__()


@pytest.mark.parametrize("asked", [None, "none", "required", NAMED])
async def test_tools_are_looked_into_once(asked: Any, service: Service, limits: Limits) -> None:
    """Schemas of megabytes would be checked again and again."""
    offered = Looked(TOOLS)
    [job] = await service.chat_jobs(ask(limits, tools=offered, tool_choice=asked))
    job.reader()
    assert offered.times == 1
