"""Text, token ids, logprobs and usage of an answer agree, whole and streamed, wherever it ends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.coordinator.admission import MOST_LOGPROBS
from distspec.protocol.values import TokenLogprobs
from distspec.serving import logprobs
from distspec.serving.http import create_app
from distspec.serving.limits import Limits
from distspec.serving.service import Service
from distspec.serving.text import Decoder, Text, spelled
from tests.unit.serving.conftest import TableClient, logprobs_of
from tests.unit.serving.test_http import HealthyFleet, events, post
from tests.words import byte_level

UNICODE = st.text(alphabet=st.characters(codec="utf-8"), max_size=30)
VOCAB = 300


@pytest.fixture
async def http(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(service, HealthyFleet()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


# -- tokens by themselves ------------------------------------------------------------------------------


@given(ids=st.lists(st.integers(0, 340), max_size=40))
def test_what_tokens_spell_joins_to_the_text(text: Text, ids: list[int]) -> None:
    shown = b"".join(text.spell(token) for token in ids if token not in text.special_ids)
    assert shown.decode(errors="replace") == text.decode(ids)


@given(whole=UNICODE)
def test_bytes_and_spaces_of_pieces_are_spelled_too(fallback_text: Text, whole: str) -> None:
    whole = whole.replace("<|", "< |")  # or it may name a special token
    ids = fallback_text.encode(whole)
    assert b"".join(map(fallback_text.spell, ids)).decode() == (f" {whole}" if whole else "")


def test_special_tokens_are_spelled_by_name(text: Text) -> None:
    assert [text.spell(token) for token in text.stop_ids] == [b"<|endoftext|>", b"<|im_end|>"]
    assert text.spell(10**6) == b"", "the padding of an embedding"


# -- which tokens come with which text -------------------------------------------------------------------


@given(
    ids=st.lists(st.integers(0, 323), min_size=1, max_size=60),
    stops=st.lists(st.text(alphabet="the quick\ufffd", min_size=1, max_size=4), max_size=3),
    cuts=st.sets(st.integers(1, 59)),
)
@pytest.mark.parametrize("kind", ["text", "fallback_text"])
def test_a_token_is_released_with_the_end_of_its_text(
    request: pytest.FixtureRequest, kind: str, ids: list[int], stops: list[str], cuts: set[int]
) -> None:
    """And not before: without stops, what tokens spell is there when they are."""
    text: Text = request.getfixturevalue(kind)
    decoder, given_, taken, found = Decoder(text, stops), "", 0, list[int]()
    edges = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    for start, end in pairwise(edges):
        piece, count, stopped = decoder.push(ids[start:end], last=end == len(ids))
        given_, taken = given_ + piece, taken + count
        found += decoder.release(everything=stopped or end == len(ids))
        assert len(given_) >= len(text.decode(ids[: len(found)]).rstrip("\ufffd")) or stopped
        assert found == sorted(found)
        if piece and not (stopped or end == len(ids)):
            assert len(found) == taken or len(text.decode(ids[: len(found) + 1])) > len(given_)
        if stopped:
            break
    assert len(found) == taken
    assert all(offset <= len(given_) for offset in found)


@given(words=st.lists(st.sampled_from(["the ", "qu", "ick", "漢字", "😀", "naïve"]), max_size=12))
def test_offsets_are_where_the_tokens_begin(text: Text, words: list[str]) -> None:
    whole = "".join(words)
    ids = text.encode(whole)
    found, offsets = spelled(text, ids)
    assert found == whole
    for i, (token, offset) in enumerate(zip(ids, offsets, strict=True)):
        assert offset == len(b"".join(map(text.spell, ids[:i])).decode(errors="ignore"))
        name = text.spell(token).decode(errors="replace")
        assert "\ufffd" in name or whole[offset:].startswith(name)


# -- shapes ------------------------------------------------------------------------------------------------


async def test_a_completion_has_openais_logprobs(http: httpx.AsyncClient, text: Text) -> None:
    body = await post(
        http, {"prompt": "the quick", "max_tokens": 12, "seed": 3, "logprobs": 2, "return_token_ids": True}
    )
    [choice] = body["choices"]
    ids, told = choice["token_ids"], choice["logprobs"]
    assert choice["prompt_token_ids"] == list(text.encode("the quick"))
    assert told.keys() == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert len(ids) == body["usage"]["completion_tokens"] == len(told["tokens"])
    for token, name, logprob, top, said in zip(
        ids, told["tokens"], told["token_logprobs"], told["top_logprobs"], logprobs_of(ids, 2, VOCAB), strict=True
    ):
        assert (name, logprob) == (text.spell(token).decode(errors="backslashreplace"), said.logprob)
        assert top[name] == logprob
        names = [text.spell(other).decode(errors="backslashreplace") for other, _ in said.top]
        assert list(top) == list(dict.fromkeys([*names, name]))


async def test_a_chat_has_openais_logprobs(http: httpx.AsyncClient, text: Text) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 3, "return_token_ids": True}
    path = "/v1/chat/completions"
    body = await post(http, asked | {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": 1}, path)
    [choice] = body["choices"]
    ids, content = choice["token_ids"], choice["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    for token, entry, said in zip(ids, content, logprobs_of(ids, 3, VOCAB), strict=True):
        assert bytes(entry["bytes"]) == text.spell(token)
        assert entry["logprob"] == said.logprob
        assert [(bytes(other["bytes"]), other["logprob"]) for other in entry["top_logprobs"]] == [
            (text.spell(other), logprob) for other, logprob in said.top
        ]
    assert len(body["prompt_token_ids"]) == len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    without = (await post(http, asked | {"logprobs": True}, path))["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in without] == [[]] * len(content)
    assert (await post(http, asked, path))["choices"][0]["logprobs"] is None


async def test_a_prompt_has_vllms_logprobs(http: httpx.AsyncClient, text: Text) -> None:
    body = await post(http, {"prompt": [[5, 6, 290], [9]], "max_tokens": 2, "prompt_logprobs": 2, "n": 2})
    for choice in body["choices"][:2]:
        assert choice["prompt_logprobs"][0] is None
        for token, known in zip((6, 290), choice["prompt_logprobs"][1:], strict=True):
            [said] = logprobs_of([token], 2, VOCAB)
            assert known[str(token)]["rank"] == said.rank
            assert {int(other): entry["logprob"] for other, entry in known.items()} == {
                **dict(said.top),
                token: said.logprob,
            }
            assert known[str(token)]["decoded_token"] == text.spell(token).decode(errors="backslashreplace")
    assert [choice["prompt_logprobs"] for choice in body["choices"][2:]] == [[None]] * 2
    assert "token_ids" not in body["choices"][0]


async def test_an_echo_is_one_text_with_the_answer(http: httpx.AsyncClient, text: Text) -> None:
    asked = {"prompt": "the 漢 quick", "max_tokens": 9, "seed": 3}
    plain = (await post(http, asked))["choices"][0]["text"]
    prompt = text.encode("the 漢 quick")
    for more in ({}, {"logprobs": 1}):
        whole = await post(http, asked | {"echo": True, **more})
        [choice] = whole["choices"]
        assert choice["text"] == "the 漢 quick" + plain
        assert whole["usage"]["completion_tokens"] == 9
    told = choice["logprobs"]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["token_logprobs"][1 : len(prompt)] == [said.logprob for said in logprobs_of(prompt[1:], 1, VOCAB)]
    assert len(told["tokens"]) == len(prompt) + 9
    for name, offset in list(zip(told["tokens"], told["text_offset"], strict=True))[: len(prompt) + 1]:
        assert "\\x" in name or name.startswith("<|") or choice["text"][offset:].startswith(name)
    assert told["text_offset"] == sorted(told["text_offset"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [None, 0, 2])
async def test_an_echo_without_an_answer_is_the_prompt(
    http: httpx.AsyncClient, client: TableClient, text: Text, most: int | None, stream: bool
) -> None:
    """What scores of given texts are asked by. The token that is made all the same shows nowhere, even if it ends."""
    prompt = text.encode("the 漢 quick")
    client.answers[prompt] = [text.stop_ids[0]]
    asked: dict[str, Any] = {"prompt": "the 漢 quick", "max_tokens": 0, "echo": True, "logprobs": most}
    asked |= {"return_token_ids": True, "truncate_prompt_tokens": -1}
    if stream:
        *bodies, usage, _ = await events(http, asked | {"stream_options": {"include_usage": True}})
        [body] = [body | {"usage": usage["usage"]} for body in bodies]
    else:
        body = await post(http, asked)
    [choice] = body["choices"]
    assert (choice["text"], choice["token_ids"]) == ("the 漢 quick", [])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (len(prompt), 0)
    told = choice["logprobs"]
    if most is None:
        assert told is None
    else:
        said = logprobs_of(prompt[1:], most, VOCAB)
        assert told["token_logprobs"] == [None, *(one.logprob for one in said)]
        assert len(told["tokens"]) == len(told["text_offset"]) == len(told["top_logprobs"]) == len(prompt)


@pytest.mark.parametrize(("most", "of_prompt"), [(1, 4), (4, 1), (0, 3), (3, 0)])
async def test_an_echo_and_a_prompt_are_told_of_as_each_is_asked_for(
    http: httpx.AsyncClient, client: TableClient, most: int, of_prompt: int
) -> None:
    asked = {"prompt": [5, 6, 290], "max_tokens": 2, "echo": True, "logprobs": most, "prompt_logprobs": of_prompt}
    [choice] = (await post(http, asked))["choices"]
    for i, token in enumerate((6, 290), start=1):
        assert choice["prompt_logprobs"][i].keys() == _told(token, of_prompt)
        assert len(choice["logprobs"]["top_logprobs"][i]) == len(_told(token, most))
    assert [params.prompt_logprobs for _, params, _ in client.submitted] == [4 if 4 in (most, of_prompt) else 3]


def _told(token: int, most: int) -> set[str]:
    """Ids of the tokens that are told of in the place of one."""
    [said] = logprobs_of([token], most, VOCAB)
    return {str(token), *(str(other) for other, _ in said.top)}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_logprobs_of_a_prompt_are_computed_once(
    http: httpx.AsyncClient, client: TableClient, stream: bool
) -> None:
    """And told with each of its choices."""
    prompts = [[5, 6, 290], [9, 8]]
    asked: dict[str, Any] = {"prompt": prompts, "max_tokens": 4, "n": 3, "echo": True, "logprobs": 1, "seed": 3}
    if stream:
        found: dict[int, list[Any]] = {}
        for body in (await events(http, asked))[:-1]:
            [choice] = body["choices"]
            found.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
        told = [found[index] for index in range(6)]
    else:
        told = [choice["logprobs"]["token_logprobs"] for choice in (await post(http, asked))["choices"]]
    for i, row in enumerate(told):
        prompt = prompts[i // 3]
        assert row[: len(prompt)] == [None, *(one.logprob for one in logprobs_of(prompt[1:], 1, VOCAB))]
        assert len(row) == len(prompt) + 4
    assert [params.prompt_logprobs for _, params, _ in client.submitted] == [1, None, None] * 2


async def test_a_chat_echoes_what_the_assistant_has_said(client: TableClient, limits: Limits) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    service = Service(client, Text(tokenizer), limits)
    transport = httpx.ASGITransport(create_app(service, HealthyFleet()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for role, begins in (("assistant", "so far"), ("user", "")):
            messages = [{"role": "user", "content": "say"}, {"role": role, "content": "so far"}]
            asked: dict[str, Any] = {"messages": messages, "max_tokens": 4, "seed": 1}
            plain = (await post(http, asked, "/v1/chat/completions"))["choices"][0]["message"]["content"]
            body = await post(http, asked | {"echo": True, "logprobs": True}, "/v1/chat/completions")
            assert body["choices"][0]["message"]["content"] == begins + plain
            assert len(body["choices"][0]["logprobs"]["content"]) == body["usage"]["completion_tokens"]


# -- streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("seed", range(12))
async def test_streamed_logprobs_and_ids_are_those_of_the_whole(http: httpx.AsyncClient, path: str, seed: int) -> None:
    """Stop strings end some of the answers, in the middle of a run and of a character."""
    asked: dict[str, Any] = {"seed": seed, "max_tokens": 40, "n": 2, "stop": ["x", "q1", "\ufffdz", "th"]}
    asked |= {"return_token_ids": True}
    asked |= {"prompt": "a 漢", "logprobs": 2, "echo": seed % 2 == 0} if path == "/v1/completions" else {}
    asked |= {} if "prompt" in asked else {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
    whole = await post(http, asked, path)
    streamed = (await events(http, asked, path))[:-1]
    for index, choice in enumerate(whole["choices"]):
        mine = [(body, body["choices"][0]) for body in streamed if body["choices"][0]["index"] == index]
        assert [token for _, piece in mine for token in piece["token_ids"]] == choice["token_ids"]
        parts = [piece["logprobs"] for _, piece in mine]
        for name, column in choice["logprobs"].items():
            assert [item for part in parts for item in part[name] or []] == (column or []), name
        told = [piece if path == "/v1/completions" else body for body, piece in mine]
        assert ["prompt_token_ids" in place for place in told] == [True] + [False] * (len(told) - 1)
    assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]


def test_json_has_no_infinity(text: Text) -> None:
    never = TokenLogprobs(logprob=float("-inf"), rank=9, top=((3, 0.0),))
    shapes = (
        logprobs.completion(text.spell, [4], [0], [never]),
        logprobs.chat(text.spell, [4], [never]),
        {"prompt": logprobs.prompt(text.spell, [5, 4], [never])},
    )
    for shape in shapes:
        assert "-9999.0" in json.dumps(shape, allow_nan=False)


def test_an_answer_with_all_logprobs_that_a_prompt_may_have_is_of_some_ten_megabytes(text: Text) -> None:
    """It is held and written as a whole."""
    told = logprobs_of([1] * 999, 20, VOCAB)
    per_logprob = len(json.dumps(logprobs.prompt(text.spell, [1] * 1000, told))) / (999 * 21)
    assert per_logprob * MOST_LOGPROBS < 25e6
