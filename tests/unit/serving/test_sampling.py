"""Any combination of parameters in range resolves to what was meant; one value out of range is refused by its field."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.errors import InvalidField, RequestError
from distspec.serving import sampling, schema
from distspec.serving.limits import Limits
from distspec.serving.schema import ChatRequest, CompletionRequest
from distspec.serving.service import Job, Service
from distspec.serving.text import Text
from tests.bad_requests import bad_values
from tests.unit.serving.conftest import TableClient

VOCAB, CONTEXT = 350, 200
IDS = st.integers(0, VOCAB - 1)
WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
BAD = bad_values(VOCAB, CONTEXT)
PENALTIES = (("min_p", 0), ("presence_penalty", 0), ("frequency_penalty", 0), ("repetition_penalty", 1))


@pytest.fixture(scope="module")
def service(text: Text, limits: Limits) -> Service:
    return Service(TableClient(VOCAB), text, limits)


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Fields that both endpoints have, each given or not, with values in range."""
    body: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "temperature": st.one_of(st.just(0), st.floats(0, 2)),
                "top_p": st.floats(0, 1, exclude_min=True),
                "top_k": st.integers(-1, 400),
                "min_p": st.floats(0, 1),
                "presence_penalty": st.floats(-2, 2),
                "frequency_penalty": st.floats(-2, 2),
                "repetition_penalty": st.floats(1e-6, 1e6),
                "logit_bias": st.dictionaries(IDS.map(str), st.floats(-100, 100), max_size=5),
                "allowed_token_ids": st.lists(IDS, min_size=40, max_size=60, unique=True),
                "bad_words": st.lists(WORDS, max_size=4),
                "seed": st.integers(-(2**63), 2**63 - 1),
                "n": st.integers(1, 4),
                "stop": st.one_of(WORDS, st.lists(WORDS, max_size=4)),
                "stop_token_ids": st.lists(IDS, max_size=4),
                "include_stop_str_in_output": st.booleans(),
                "ignore_eos": st.booleans(),
                "truncate_prompt_tokens": st.one_of(st.just(-1), st.integers(1, CONTEXT)),
                "prompt_logprobs": st.integers(0, 20),
                "echo": st.booleans(),
                "return_token_ids": st.booleans(),
            },
        )
    )
    body = {name: draw(st.one_of(st.just(value), st.none())) if value else value for name, value in body.items()}
    most = draw(st.none() | st.integers(1, 30))
    body[draw(st.sampled_from(["max_tokens", "max_completion_tokens"]))] = most
    body["min_tokens"] = draw(st.none() | st.integers(0, most or 30))
    return body


def jobs_of(service: Service, body: Mapping[str, Any]) -> list[Job]:
    if "messages" in body:
        return asyncio.run(service.chat_jobs(schema.parse(ChatRequest, body, service.limits)))
    return asyncio.run(service.completion_jobs(schema.parse(CompletionRequest, body, service.limits)))


@given(body=bodies(), prompt=st.lists(IDS, min_size=1, max_size=120), count=st.none() | st.integers(0, 20))
def test_every_parameter_arrives(service: Service, body: dict[str, Any], prompt: list[int], count: int | None) -> None:
    jobs = jobs_of(service, body | {"prompt": prompt, "logprobs": count})

    def asked(name: str, default: Any) -> Any:
        return default if body.get(name) is None else body[name]

    keep = asked("truncate_prompt_tokens", CONTEXT)
    kept = tuple(prompt if keep == -1 else prompt[-keep:])  # a prompt of 120 leaves room for any answer asked here
    stops = {*asked("stop_token_ids", []), *(() if asked("ignore_eos", False) else service.text.stop_ids)}
    least = asked("min_tokens", 0)
    most = asked("max_tokens", asked("max_completion_tokens", max(service.limits.default_max_tokens, least)))
    temperature = asked("temperature", 1.0)
    assert [job.params.choice for job in jobs] == list(range(asked("n", 1)))
    for job in jobs:
        params = job.params
        assert (job.prompt, params.prompt_tokens) == (kept, len(kept))
        assert (params.max_tokens, params.min_tokens) == (most, least)
        assert params.seed == asked("seed", jobs[0].params.seed)
        assert params.temperature == (temperature if temperature >= schema.MIN_TEMPERATURE else 0)
        assert (params.top_p, params.top_k) == (asked("top_p", 1.0), max(0, asked("top_k", 0)))
        for name, default in [
            ("min_p", 0),
            ("presence_penalty", 0),
            ("frequency_penalty", 0),
            ("repetition_penalty", 1),
        ]:
            assert getattr(params, name) == asked(name, default)
        assert dict(params.logit_bias) == {int(id): bias for id, bias in asked("logit_bias", {}).items() if bias}
        assert params.allowed_token_ids == tuple(sorted(asked("allowed_token_ids", [])))
        assert params.stop_token_ids == tuple(sorted(stops))
        wanted = (body.get("prompt_logprobs"), count if asked("echo", False) else None)
        of_prompt = max((each for each in wanted if each is not None), default=None)
        assert (params.logprobs, params.prompt_logprobs) == (count, None if params.choice else of_prompt)
        stop = asked("stop", [])
        assert job.stops == ((stop,) if isinstance(stop, str) else tuple(stop))
        assert job.include_stop == asked("include_stop_str_in_output", False)
        spellings = {service.text.decode(word).strip() for word in params.bad_words}
        assert spellings == {word.strip() for word in asked("bad_words", [])}  # one of white space bans the space


@settings(max_examples=300)
@given(body=bodies(), bad=st.sampled_from(BAD), chat=st.booleans())
def test_one_bad_value_is_refused_whatever_else_is_asked(
    service: Service, body: dict[str, Any], bad: tuple[str, Any, str], chat: bool
) -> None:
    name, value, field = bad
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    with pytest.raises(RequestError) as caught:
        jobs_of(service, prompt | body | {name: value})
    assert caught.value.field == field


@given(
    length=st.integers(1, 400),
    limit=st.none() | st.integers(1, 190),
    least=st.none() | st.integers(0, 190),
)
def test_as_many_prompt_tokens_are_kept_as_leave_room_for_the_answer(
    service: Service, length: int, limit: int | None, least: int | None
) -> None:
    ids = [i % VOCAB for i in range(length)]
    least = None if least is None else min(least, limit or 190)
    asked = {"prompt": ids, "truncate_prompt_tokens": -1, "max_tokens": limit, "min_tokens": least}
    [job] = jobs_of(service, asked)
    room = limit or max(service.limits.default_max_tokens, least or 0)
    assert job.prompt == tuple(ids[-(CONTEXT - room) :])
    assert job.params.max_tokens >= room
    assert len(job.prompt) + job.params.max_tokens <= CONTEXT
    assert limit in (None, job.params.max_tokens)


def test_a_default_longer_than_the_context_leaves_half_of_it_to_the_prompt(text: Text, limits: Limits) -> None:
    service = Service(TableClient(VOCAB), text, replace(limits, default_max_tokens=10 * CONTEXT))
    [job] = jobs_of(service, {"prompt": [1] * 400, "truncate_prompt_tokens": -1})
    assert (len(job.prompt), job.params.max_tokens) == (CONTEXT // 2, CONTEXT // 2)


def test_texts_and_chats_keep_their_end(service: Service) -> None:
    text = "the quick brown fox " * 40
    [job] = jobs_of(service, {"prompt": text, "truncate_prompt_tokens": 7})
    assert job.prompt == service.text.encode(text)[-7:]
    turns = [{"role": "user", "content": text}]
    [job] = jobs_of(service, {"messages": turns, "truncate_prompt_tokens": 9})
    assert job.prompt == service.text.encode(service.text.render(turns), add_special_tokens=False)[-9:]
    with pytest.raises(InvalidField) as caught:
        jobs_of(service, {"prompt": [1] * 180, "truncate_prompt_tokens": 180, "max_tokens": 21})
    assert caught.value.field == "max_tokens"


@pytest.mark.parametrize("tokenizer", ["text", "fallback_text"])
def test_bad_words_are_spelled_at_the_beginning_and_after_a_space(
    tokenizer: str, request: pytest.FixtureRequest, limits: Limits
) -> None:
    text: Text = request.getfixturevalue(tokenizer)
    found = sampling.bad_words(["the", " quick", "zz"], text, limits)
    for word in ("the", "quick", "zz"):
        assert text.encode(word, add_special_tokens=False) in found
        assert text.encode(f" {word}", add_special_tokens=False) in found
    assert len(found) == 6
    assert sampling.bad_words([" ", "the", "the "], text, limits)[-1] != ()


def test_words_beyond_the_models_vocabulary_are_refused(text: Text, limits: Limits) -> None:
    with pytest.raises(InvalidField) as caught:
        sampling.bad_words(["a", "the"], text, replace(limits, vocab_size=max(text.encode("a")) + 1))
    assert caught.value.field in ("bad_words[0]", "bad_words[1]")


def test_something_is_left_to_draw(service: Service) -> None:
    token, other = service.text.encode("a")[0], service.text.encode("b")[0]
    asked = {"prompt": "a", "allowed_token_ids": [token, other]}
    assert jobs_of(service, asked | {"bad_words": ["a"]})
    assert jobs_of(service, asked | {"stop_token_ids": [token, other]})
    for bans in ({"bad_words": ["a", "b"]}, {"bad_words": ["a"], "stop_token_ids": [other], "min_tokens": 1}):
        with pytest.raises(InvalidField) as caught:
            jobs_of(service, asked | bans)
        assert caught.value.field == "allowed_token_ids"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_of_a_prompt_than_can_travel_are_refused_by_what_asked_for_them(
    text: Text, limits: Limits, name: str
) -> None:
    service = Service(TableClient(VOCAB), text, replace(limits, max_model_len=10**6))
    asked = {"prompt": [5] * 20_000, "echo": True, "max_tokens": 1}
    assert jobs_of(service, asked | {name: 5})
    with pytest.raises(InvalidField) as caught:
        jobs_of(service, asked | {name: 20})
    assert caught.value.field == name
