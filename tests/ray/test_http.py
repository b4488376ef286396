"""Real HTTP: Ray Serve, four pools of real actors, a tiny random model with a real tokenizer."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation
from transformers import AutoModelForCausalLM

from distspec.config import Config, load
from distspec.serving.ingress import application
from distspec.workers import fleet as fleets
from distspec.workers.fleet import FleetHandle
from tests.bad_requests import bad_requests
from tests.ray.worded import CONTEXT, VOCAB, save_worded_model

QUEUED = 4
LONG = 2000
"""Tokens of an answer that is still being made when a client has done something about its first one."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("worded")
    save_worded_model(folder)
    return load(
        {
            "name": "http",
            "model": {"name": str(folder), "max_model_len": CONTEXT, "served_name": "tiny"},
            "engine": {"num_pages": 560, "page_size": 16, "max_num_seqs": 4, "num_threads": 1},
            "coordinator": {"max_queued_requests": QUEUED, "heartbeat_s": 0.2, "lease_s": 10.0},
            "pools": {pool: {"replicas": 1} for pool in ("prefill", "decode", "verify", "draft")},
            "server": {"max_n": 4, "tool_call_parser": "hermes"},
        }
    )


@pytest.fixture(scope="module")
def url(cluster: None, config: Config) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=HTTPOptions(host="127.0.0.1", port=port))
    serve.run(application(config), name=config.name, route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    fleets.shutdown(config.name)


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def handle(url: str) -> FleetHandle:
    return fleets.attach("http")


def wait_until_idle(handle: FleetHandle) -> None:
    """Nothing of any request is left, neither with the coordinator nor with a worker."""
    for _ in range(1200):
        status = asyncio.run(handle.status())
        if not status["requests"] and not any(worker["open"] for worker in status["workers"].values()):
            return
        time.sleep(0.05)
    pytest.fail(f"work is left: {status}")


def test_the_openai_client_gets_whole_and_streamed_answers(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the quick brown fox"}],
        "max_tokens": 40,
        "seed": 7,
        "temperature": 1.0,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.usage is not None
    streamed = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(streamed)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_policy_changes_a_token(client: openai.OpenAI, temperature: float) -> None:
    texts = {
        client.completions.create(
            model="tiny",
            prompt="0 1 2 3 0 1 2 3 0 1",
            max_tokens=48,
            seed=3,
            temperature=temperature,
            extra_body={"speculation": {"policy": policy}, "ignore_eos": True},
        )
        .choices[0]
        .text
        for policy in ("ar", "sd", "dsi")
    }
    assert len(texts) == 1


@pytest.mark.parametrize("policy", ["ar", "sd", "dsi", "ssd"])
def test_logprobs_are_those_of_transformers(client: openai.OpenAI, config: Config, policy: str) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32)
    extra = {"speculation": {"policy": policy}, "ignore_eos": True, "return_token_ids": True, "prompt_logprobs": 2}
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "seed": 3, "extra_body": extra}
    [choice] = client.completions.create(**asked, prompt="0 1 2 3 0 1 2 3", logprobs=4, echo=True).choices
    assert choice.logprobs is not None
    found = choice.model_dump()
    prompt, text = found["prompt_token_ids"], found["prompt_token_ids"] + found["token_ids"]
    with torch.inference_mode():
        right = theirs(torch.tensor([text])).logits[0].log_softmax(-1)[:-1]
    drawn = right.gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(drawn.tolist(), abs=1e-4)
    scored = client.completions.create(
        model="tiny", prompt="0 1 2 3 0 1 2 3", max_tokens=0, n=2, logprobs=4, echo=True, extra_body=extra
    )
    assert scored.usage is not None
    assert (scored.usage.prompt_tokens, scored.usage.completion_tokens) == (len(prompt), 0)
    for alone in scored.choices:
        assert (alone.text, alone.finish_reason) == ("0 1 2 3 0 1 2 3", "length")
        assert alone.logprobs is not None
        assert alone.logprobs.token_logprobs is not None
        assert alone.logprobs.token_logprobs[1:] == pytest.approx(drawn[: len(prompt) - 1].tolist(), abs=1e-4)
    for at, top in list(enumerate(found["logprobs"]["top_logprobs"]))[len(prompt) :]:
        known = [*right[at - 1].topk(4).values.tolist(), float(drawn[at - 1])]
        assert max(top.values()) == pytest.approx(known[0], abs=1e-4)
        # Fewer are listed where tokens without text are among them, which are spelled alike.
        assert all(min(abs(value - other) for other in known) < 1e-4 for value in top.values())
    for token, row, known in zip(prompt[1:], right, found["prompt_logprobs"][1:], strict=False):
        assert known[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
    chat = client.chat.completions.create(
        **asked, messages=[{"role": "user", "content": "fox"}], logprobs=True, top_logprobs=2
    )
    body, [said] = chat.model_dump(), chat.choices
    text = body["prompt_token_ids"] + body["choices"][0]["token_ids"]
    with torch.inference_mode():
        right = theirs(torch.tensor([text])).logits[0].log_softmax(-1)[len(body["prompt_token_ids"]) - 1 : -1]
    assert said.logprobs is not None
    assert said.logprobs.content is not None
    for token, row, entry in zip(body["choices"][0]["token_ids"], right, said.logprobs.content, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


POINT = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "point", "parameters": POINT}}]
SPELLED = r'so: <tool_call>\n\{"name": "point", "arguments": \{"x": [0-9]\}\}\n</tool_call>'


@pytest.mark.parametrize(
    ("choice", "content", "extra"),
    [("required", None, {}), ("auto", "so:", {"structured_outputs": {"regex": SPELLED}})],
)
def test_calls_of_tools_are_streamed_as_they_are_whole(
    client: openai.OpenAI, choice: str, content: str | None, extra: dict[str, Any]
) -> None:
    """A random model calls nothing of its own accord; here a regex makes it spell a call."""
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 200}
    asked |= {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 5, "extra_body": extra}
    [whole] = client.chat.completions.create(**asked).choices
    [call] = whole.message.tool_calls or []
    assert (whole.message.content, whole.finish_reason, call.function.name) == (content, "tool_calls", "point")
    assert 0 <= json.loads(call.function.arguments)["x"] <= 9
    streamed = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(choice.delta.content or "" for choice in streamed) == (content or "")
    first, *rest = [part for choice in streamed for part in choice.delta.tool_calls or []]
    assert (first.index, first.type, first.function.name) == (0, "function", "point")
    assert all(part.id is None and part.function.name is None for part in rest)
    assert "".join(part.function.arguments for part in (first, *rest)) == call.function.arguments
    assert streamed[-1].finish_reason == "tool_calls"


def test_choices_differ_and_can_be_had_again(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "fox", "max_tokens": 24, "n": 3}
    first = client.completions.create(**asked)
    seed = first.model_dump()["distspec"]["seed"]
    texts = [choice.text for choice in first.choices]
    assert [choice.text for choice in client.completions.create(**asked, seed=seed).choices] == texts
    # A tiny random model repeats itself, so not every seed gives three answers that differ; these are always the same.
    seeded = [client.completions.create(**asked, seed=seed, temperature=2.0).choices for seed in range(5)]
    assert any(len({choice.text for choice in choices}) == 3 for choices in seeded)


def test_bad_input_is_refused_by_field(http: httpx.Client, handle: FleetHandle) -> None:
    before = asyncio.run(handle.status())["counters"].get("requests", 0)
    for bad in bad_requests(VOCAB, CONTEXT):
        content = json.dumps(bad.body).encode() if bad.raw is None else bad.raw
        headers = {"content-type": bad.content_type} if bad.content_type else {}
        answer = http.request(bad.method, bad.path, content=content, headers=headers)
        assert answer.status_code == bad.status, (bad.name, answer.text)
        error = answer.json()["error"]
        assert error["param"] == (bad.field.encode(errors="replace").decode() if bad.field else None), bad.name
    assert asyncio.run(handle.status())["counters"].get("requests", 0) == before


def test_the_first_token_arrives_while_the_answer_is_being_made(http: httpx.Client, handle: FleetHandle) -> None:
    body = {"prompt": "the", "max_tokens": LONG, "ignore_eos": True, "stream": True, "seed": 1}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert asyncio.run(handle.status())["requests"]
        assert [line for line in lines if line][-1] == "data: [DONE]"
    wait_until_idle(handle)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_everything(url: str, handle: FleetHandle, stream: bool) -> None:
    before = asyncio.run(handle.status())["counters"]["tokens"]
    body = {"prompt": ["the", "fox"], "n": 2, "max_tokens": LONG, "ignore_eos": True, "stream": stream}
    with httpx.Client(base_url=url, timeout=60) as http:
        if stream:
            with http.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.3))
    wait_until_idle(handle)
    made = asyncio.run(handle.status())["counters"]["tokens"] - before
    assert 0 < made < 4 * LONG, "the answers were made to the end"


async def test_what_is_too_much_is_refused_early_and_the_rest_is_served(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        body = {"prompt": "the", "max_tokens": 400, "ignore_eos": True}
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(40)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    assert len(answers) - len(refused) >= QUEUED
    for answer in refused:
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "overloaded"


def test_health_models_and_metrics(http: httpx.Client, client: openai.OpenAI) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    metrics = http.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'distspec_worker_requests{worker="decode:0",role="decode"}' in metrics.text


@pytest.mark.needs("curl")
def test_curl_streams(url: str) -> None:
    body = json.dumps({"prompt": "the", "max_tokens": 8, "stream": True, "ignore_eos": True})
    command = ["curl", "-sN", f"{url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    events = [line for line in done.stdout.split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events[:-1])
