"""The endpoints in process: OpenAI's shapes, errors that name the field, and clients that go away."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.errors import Overloaded, Unavailable
from distspec.protocol.values import SamplingParams
from distspec.serving import schema
from distspec.serving.http import create_app
from distspec.serving.limits import Limits
from distspec.serving.schema import ChatRequest, CompletionRequest
from distspec.serving.service import Service
from distspec.serving.text import Text
from tests.bad_requests import Bad, bad_requests
from tests.unit.serving.conftest import TableClient

CORPUS = bad_requests(vocab_size=350, max_model_len=200)


class HealthyFleet:
    reason: str | None = None

    async def health(self) -> str | None:
        return self.reason

    async def metrics(self) -> str:
        return "# TYPE distspec_up gauge\ndistspec_up 1\n"


@pytest.fixture
def fleet() -> HealthyFleet:
    return HealthyFleet()


@pytest.fixture
def app(service: Service, fleet: HealthyFleet) -> FastAPI:
    return create_app(service, fleet)


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def post(http: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def events(http: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/completions") -> list[Any]:
    answer = await http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = answer.text.strip().split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line[6:] == "[DONE]" else json.loads(line[6:]) for line in lines]


@pytest.mark.parametrize("field", ["response_format", "tool_choice", "temperature", "tools"])
async def test_no_depth_is_a_fault_of_ours(http: httpx.AsyncClient, field: str) -> None:
    for depth in range(400, 1000, 20) if field == "tools" else range(800, 1000):
        deep = '{"type":' * depth + "1" + "}" * depth
        if field == "tools":
            deep = f'[{{"type":"function","function":{{"name":"f","parameters":{deep}}}}}],"tool_choice":"required"'
        body = f'{{"messages":[{{"role":"user","content":"a"}}],"max_tokens":1,"{field}":{deep}}}'
        headers = {"content-type": "application/json"}
        answer = await http.post("/v1/chat/completions", content=body.encode(), headers=headers)
        assert answer.status_code == 400, (depth, answer.text)


ODD = st.sampled_from([None, True, 0, -1, 10**30, 1e308, 5e-324, float("nan"), "", "auto", "\0", "\ud800", "漢"])
VALUES = st.recursive(
    ODD,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "text", "json", "5", "", "\ud800"]), inner, max_size=3
        )
    ),
    max_leaves=5,
)
FIELDS = sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *schema.UNSUPPORTED})
WRAPS: dict[str, Callable[[Any], Any]] = {
    "messages": lambda value: [{"role": "assistant", "content": "a", "tool_calls": [{"function": value}]}],
    "tools": lambda value: [{"type": "function", "function": {"name": "f", "parameters": value, "strict": value}}],
    "tool_choice": lambda value: {"type": "function", "function": {"name": value}},
    "response_format": lambda value: {"type": "json_schema", "json_schema": {"schema": value}},
    "structured_outputs": lambda value: {"json": value},
    "logit_bias": lambda value: {"5": value},
    "stop": lambda value: ["a", value],
    "stop_token_ids": lambda value: [5, value],
    "chat_template_kwargs": lambda value: {"x": value},
}
"""Deeper places for a value, by field."""


@settings(max_examples=300, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=2), wraps=st.booleans())
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_value_anywhere_is_a_fault_of_ours(
    path: str, fields: dict[str, Any], wraps: bool, text: Text, limits: Limits
) -> None:
    start = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    found = {name: WRAPS.get(name, lambda value: value)(value) if wraps else value for name, value in fields.items()}

    async def ask() -> httpx.Response:
        app = create_app(Service(TableClient(limits.vocab_size), text, limits), HealthyFleet())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            content = json.dumps({"max_tokens": 2, **start, **found}).encode()
            return await client.post(path, content=content, headers={"content-type": "application/json"})

    answer = asyncio.run(ask())
    if answer.status_code != 200:
        assert answer.status_code in (400, 404), answer.text
        assert re.split(r"[.\[]", answer.json()["error"]["param"])[0] in FIELDS, answer.text


@pytest.mark.parametrize("bad", CORPUS, ids=lambda bad: bad.name)
async def test_bad_input_is_refused_by_field(http: httpx.AsyncClient, client: TableClient, bad: Bad) -> None:
    content = json.dumps(bad.body).encode() if bad.raw is None else bad.raw
    headers = {"content-type": bad.content_type} if bad.content_type else {}
    answer = await http.request(bad.method, bad.path, content=content, headers=headers)
    assert answer.status_code == bad.status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == (bad.field.encode(errors="replace").decode() if bad.field else None), error
    assert error["message"]
    assert not client.submitted, "a bad request reached the coordinator"


async def test_a_completion_has_openais_shape(http: httpx.AsyncClient) -> None:
    body = await post(http, {"prompt": "the quick", "max_tokens": 9, "seed": 3, "ignore_eos": True})
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    [choice] = body["choices"]
    assert choice["finish_reason"] == "length"
    assert isinstance(choice["text"], str)
    usage = body["usage"]
    assert usage["completion_tokens"] == 9
    assert usage["total_tokens"] == usage["prompt_tokens"] + 9
    assert body["distspec"] == {"seed": 3}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("ends", [{}, {"include_stop_str_in_output": True, "min_tokens": 20, "stop_token_ids": [77]}])
async def test_streamed_and_whole_answers_are_the_same(
    http: httpx.AsyncClient, path: str, n: int, ends: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"seed": 11, "max_tokens": 30, "n": n, "stop": ["x", "q", "zz"], **ends}
    asked |= {"prompt": ["a", "漢"]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    whole = await post(http, asked, path)
    streamed = await events(http, asked | {"stream_options": {"include_usage": True}}, path)
    assert streamed.pop() == "[DONE]"
    last = streamed.pop()
    assert last["choices"] == []
    assert {**last["usage"], "distspec": None} == {**whole["usage"], "distspec": None}
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for body in streamed:
        assert body["usage"] is None
        assert body["id"] == last["id"]
        [choice] = body["choices"]
        index = choice["index"]
        assert index not in reasons, "an answer went on after its end"
        if path.endswith("chat/completions"):
            assert ("role" in choice["delta"]) == (index not in texts)
        piece = choice["delta"]["content"] if "delta" in choice else choice["text"]
        texts[index] = texts.get(index, "") + piece
        if choice["finish_reason"]:
            reasons[index] = choice["finish_reason"]
    for choice in whole["choices"]:
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert texts[choice["index"]] == text
        assert reasons[choice["index"]] == choice["finish_reason"]
    assert len(whole["choices"]) == n * (2 if path == "/v1/completions" else 1)


@pytest.mark.parametrize("n", [1, 3])
async def test_counts_may_come_with_every_chunk(http: httpx.AsyncClient, n: int) -> None:
    """Of its own choice, as far as that has come."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": ["a", "the quick"], "n": n, "stop": ["x"], "max_tokens": 30, "return_token_ids": True}
    *chunks, last, _ = await events(http, asked | {"stream_options": options})
    made: dict[int, int] = {}
    prompts: dict[int, int] = {}
    for body in chunks:
        [choice] = body["choices"]
        index, usage = choice["index"], body["usage"]
        made[index] = made.get(index, 0) + len(choice["token_ids"])
        prompts[index] = usage["prompt_tokens"]
        assert usage["completion_tokens"] == made[index]
        assert usage["total_tokens"] == made[index] + prompts[index]
    assert sum(made.values()) == last["usage"]["completion_tokens"]
    assert sum(prompts.values()) == last["usage"]["prompt_tokens"] * n


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_fields_that_change_no_answer_are_taken(http: httpx.AsyncClient, path: str) -> None:
    """Those of others' clients, with the values that ask for nothing."""
    asked: dict[str, Any] = {"seed": 5, "max_tokens": 9}
    asked |= {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    known = ChatRequest.__struct_fields__ if "messages" in asked else CompletionRequest.__struct_fields__
    neutral = {name: values[-1] for name, values in schema.UNSUPPORTED.items() if name not in known}
    plain = await post(http, asked, path)
    found = await post(http, asked | neutral | dict.fromkeys(schema.HARMLESS, "x"), path)
    assert found["choices"] == plain["choices"]


async def test_choices_share_a_seed_and_differ(http: httpx.AsyncClient, client: TableClient) -> None:
    first = await post(http, {"prompt": "a", "n": 3})
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    again = await post(http, {"prompt": "a", "n": 3, "seed": first["distspec"]["seed"]})
    assert [choice["text"] for choice in again["choices"]] == texts
    assert [params.choice for _, params, _ in client.submitted] == [0, 1, 2] * 2


async def test_a_prompt_that_is_listed_again_gets_other_answers(http: httpx.AsyncClient) -> None:
    """With or without a seed, which makes all of them again; the others are as they are alone."""
    asked: dict[str, Any] = {"prompt": ["a", "b", "a"], "n": 2, "max_tokens": 9, "prompt_logprobs": 1}
    first = await post(http, asked)
    seed, texts = first["distspec"]["seed"], [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 6
    assert [choice["text"] for choice in (await post(http, asked | {"seed": seed}))["choices"]] == texts
    told = [choice["prompt_logprobs"] for choice in first["choices"]]
    for prompt, n, at in (("a", 4, [0, 1, 4, 5]), ("b", 2, [2, 3])):
        alone = await post(http, asked | {"seed": seed, "prompt": prompt, "n": n})
        assert [choice["text"] for choice in alone["choices"]] == [texts[i] for i in at]
        assert [choice["prompt_logprobs"] for choice in alone["choices"]] == [told[i] for i in at]


async def test_requests_without_a_seed_get_different_ones(http: httpx.AsyncClient) -> None:
    seeds = {(await post(http, {"prompt": "a"}))["distspec"]["seed"] for _ in range(5)}
    assert len(seeds) == 5


async def test_parameters_arrive_as_they_were_meant(http: httpx.AsyncClient, client: TableClient) -> None:
    await post(
        http,
        {
            "model": "tiny",
            "prompt": [5, 6],
            "max_tokens": 3,
            "temperature": 1e-7,
            "top_p": 0.5,
            "top_k": -1,
            "min_p": 0.1,
            "seed": -4,
            "stop_token_ids": [7],
            "ignore_eos": True,
            "user": "me",
            "min_tokens": 2,
            "presence_penalty": 0.5,
            "frequency_penalty": -1,
            "repetition_penalty": 1.2,
            "logit_bias": {"9": -100, "8": 1.5},
            "allowed_token_ids": [9, 8, 7],
            "logprobs": 3,
            "prompt_logprobs": 0,
            "speculation": {"policy": "sd", "num_speculative_tokens": 4},
        },
    )
    [(prompt, params, speculation)] = client.submitted
    assert prompt == (5, 6)
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (3, 0.0, 0.5, 0)
    assert (params.min_p, params.seed, params.stop_token_ids) == (0.1, -4, (7,))
    assert (params.prompt_tokens, params.min_tokens) == (2, 2)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -1, 1.2)
    assert (params.logit_bias, params.allowed_token_ids) == (((8, 1.5), (9, -100)), (7, 8, 9))
    assert (params.logprobs, params.prompt_logprobs) == (3, 0)
    assert (speculation.policy, speculation.num_speculative_tokens) == ("sd", 4)


async def test_defaults_are_openais(http: httpx.AsyncClient, client: TableClient) -> None:
    await post(http, {"prompt": [5] * 190})
    [(_, params, speculation)] = client.submitted
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.choice) == (1.0, 1.0, 0, 0.0, 0)
    assert params.max_tokens == 10, "no more than the context has room for"
    assert params.stop_token_ids == (320, 322)
    assert params == SamplingParams(
        max_tokens=10, seed=params.seed, stop_token_ids=params.stop_token_ids, prompt_tokens=190
    )
    assert (speculation.policy, speculation.num_speculative_tokens) == (None, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_overload_has_its_status_also_for_streams(
    http: httpx.AsyncClient, client: TableClient, stream: bool
) -> None:
    client.refusal = Overloaded("full", retry_after_s=2)
    answer = await http.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert client.open == 0


async def test_an_error_in_a_stream_is_its_last_event(http: httpx.AsyncClient, client: TableClient) -> None:
    client.refusal, client.breaks_at = Unavailable("gone"), 1
    found = await events(http, {"prompt": "a", "ignore_eos": True, "seed": 1})
    assert found[-1]["error"]["code"] == "unavailable"
    assert "[DONE]" not in found
    assert client.open == 0


async def test_one_failed_choice_ends_the_others(http: httpx.AsyncClient, client: TableClient) -> None:
    client.refusal, client.breaks_at = Unavailable("gone"), 1
    answer = await http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})
    assert answer.status_code == 503
    assert client.open == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ends", "reason", "stop_reason"),
    [
        ({"stop": [" one", "T h", " STOP"]}, "stop", " STOP"),
        ({"stop": [" STOP"], "include_stop_str_in_output": True}, "stop", " STOP"),
        ({"stop_token_ids": [76]}, "stop", 76),
        ({"stop_token_ids": [76], "max_tokens": 2}, "length", None),
        ({}, "stop", None),
        ({"ignore_eos": True, "max_tokens": 100}, "length", None),
    ],
)
async def test_what_ended_an_answer_is_told(
    http: httpx.AsyncClient,
    client: TableClient,
    service: Service,
    stream: bool,
    ends: dict[str, Any],
    reason: str,
    stop_reason: int | str | None,
) -> None:
    """As in vLLM: the stop string, or the token that was asked to end it; nothing for the model's own."""
    prompt = service.text.encode("a")
    said = [id for id in service.text.encode("two STOP three") if id != 76]
    client.answers[prompt] = [*said, *([76] if "stop_token_ids" in ends else []), service.text.stop_ids[0]] + [5] * 100
    body = {"prompt": "a", "max_tokens": 100, "stream": stream, **ends}
    if stream:
        choice = (await events(http, body))[-2]["choices"][0]
    else:
        [choice] = (await post(http, body))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop_reason)


async def test_a_chat_has_openais_shape(http: httpx.AsyncClient) -> None:
    body = await post(http, {"messages": [{"role": "user", "content": "hi"}]}, "/v1/chat/completions")
    [choice] = body["choices"]
    assert choice["message"].keys() == {"role", "content", "refusal"}
    assert choice["message"]["refusal"] is None


async def test_a_stop_string_cancels_the_stream(http: httpx.AsyncClient, client: TableClient, service: Service) -> None:
    prompt = service.text.encode("a")
    client.answers[prompt] = list(service.text.encode("one two STOP three four five six"))
    body = await post(http, {"prompt": "a", "stop": " STOP", "max_tokens": 100})
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")
    counted = list(client.answers[prompt])[: body["usage"]["completion_tokens"]]
    assert service.text.decode(counted).endswith(" STOP")
    assert body["usage"]["distspec"]["rounds"] >= body["usage"]["completion_tokens"]
    assert client.open == 0


HANG_UP = {"type": "http.disconnect"}


class Connection:
    """An ASGI connection whose client can hang up."""

    def __init__(self, app: FastAPI, body: dict[str, Any]) -> None:
        self.sent: asyncio.Queue[Any] = asyncio.Queue()
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self.sent.put))

    def hang_up(self, message: Any = HANG_UP) -> None:
        self._inbox.put_nowait(message)

    async def _receive(self) -> Any:
        message = await self._inbox.get()
        if isinstance(message, Exception):
            raise message
        return message


@pytest.mark.parametrize("way", ["message", "error", "cancellation"])
@pytest.mark.parametrize("when", ["whole", "before the first event", "between events"])
async def test_a_client_that_goes_away_frees_everything(app: FastAPI, client: TableClient, when: str, way: str) -> None:
    client.gate = asyncio.Event()
    asked = {"prompt": ["a", "b"], "n": 2, "stream": when != "whole", "ignore_eos": True, "max_tokens": 150}
    connection = Connection(app, asked)
    async with asyncio.timeout(10):
        while client.open < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if when == "between events":
            client.gate.set()
            assert (await connection.sent.get())["type"] == "http.response.start"
            assert (await connection.sent.get())["body"].startswith(b"data: ")
            client.gate.clear()
        if way == "message":
            connection.hang_up()
        elif way == "error":
            connection.hang_up(RuntimeError("the request was cancelled"))
        else:
            connection.task.cancel()
        await asyncio.gather(connection.task, return_exceptions=True)
    assert client.open == 0


async def test_the_first_event_is_sent_while_the_rest_is_not_there_yet(
    app: FastAPI, client: TableClient, service: Service
) -> None:
    client.gate = asyncio.Event()
    client.answers[service.text.encode("a")] = list(service.text.encode("hello " * 40))
    connection = Connection(app, {"prompt": "a", "stream": True, "seed": 1})
    async with asyncio.timeout(10):
        while not client.open:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert connection.sent.empty()
        client.gate.set()
        await asyncio.sleep(0)
        client.gate.clear()
        assert (await connection.sent.get())["type"] == "http.response.start"
        assert b'"text":"h' in (await connection.sent.get())["body"]
        assert not connection.task.done()
        connection.hang_up()
        await connection.task


async def test_models_health_and_metrics(http: httpx.AsyncClient, fleet: HealthyFleet) -> None:
    assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["tiny"]
    assert (await http.get("/v1/models/tiny")).json()["id"] == "tiny"
    assert (await http.get("/health")).status_code == 200
    assert "distspec_up 1" in (await http.get("/metrics")).text
    fleet.reason = "no decode worker is up"
    answer = await http.get("/health")
    assert answer.status_code == 503
    assert "no decode worker" in answer.json()["error"]["message"]


async def test_a_bug_is_an_error_in_shape(app: FastAPI, http: httpx.AsyncClient, service: Service) -> None:
    service.completion_jobs = None  # type: ignore[assignment]
    answer = await http.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
