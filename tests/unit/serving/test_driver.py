"""Scripts with and without a loop get the same answers, and what they leave early is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from distspec.constraints.trial import Trials
from distspec.errors import FleetError, InvalidField, Overloaded, RequestError
from distspec.serving.driver import Driver
from distspec.serving.limits import Limits
from distspec.serving.service import Service
from distspec.serving.text import Text
from tests.unit.serving.conftest import TableClient
from tests.words import byte_level


@asynccontextmanager
async def opened(service: Service, log: list[str]) -> AsyncIterator[Service]:
    log.append("open")
    yield service
    log.append("closed")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def driver(service: Service, log: list[str]) -> Iterator[Driver]:
    with Driver(opened(service, log), streams=3) as driver:
        yield driver
    assert log == ["open", "closed"]


def test_prompts_are_answered_in_order(driver: Driver, client: TableClient) -> None:
    prompts = [f"prompt {i}" for i in range(20)]
    together = driver.generate(prompts, seed=5, max_tokens=8, n=2)
    alone = [completion for prompt in prompts for completion in driver.generate(prompt, seed=5, max_tokens=8, n=2)]
    assert [item.token_ids for item in together] == [item.token_ids for item in alone]
    assert [item.choice for item in together] == [0, 1] * 20
    assert client.open == 0


def test_a_chat_is_one_prompt(driver: Driver, client: TableClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    [one] = driver.generate(messages, max_tokens=4, seed=1)
    [two] = driver.generate([messages], max_tokens=4, seed=1)
    [ids] = driver.generate(list(client.submitted[0][0]), max_tokens=4, seed=1)
    assert one.token_ids == two.token_ids == ids.token_ids


def test_a_chat_may_offer_tools_and_ask_for_calls(client: TableClient, limits: Limits, trials: Trials) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ tools | map(attribute='function.name') | join(' ') }}{{ messages[0].content }}"
    service = Service(client, Text(tokenizer), limits, trials)
    with Driver(opened(service, []), streams=3) as driver:
        driver.generate(messages, max_tokens=4, tools=[tool])
        driver.generate(messages, max_tokens=4, tools=[tool], tool_choice="required", parallel_tool_calls=False)
        with pytest.raises(RequestError) as caught:
            driver.generate("a text", tools=[tool])
    assert caught.value.field == "tools"
    (offered, free, _), (_, held, _) = client.submitted
    assert tokenizer.decode(offered) == "clockhi"
    assert free.constraint is None
    assert held.constraint is not None
    assert "maxItems" in held.constraint.text


def test_logprobs_are_a_number_for_texts_and_chats(driver: Driver, client: TableClient) -> None:
    for prompt in ("hi", [{"role": "user", "content": "hi"}]):
        for count in (0, 3):
            driver.generate(prompt, max_tokens=1, logprobs=count)
            assert client.submitted[-1][1].logprobs == count
        with pytest.raises(InvalidField) as caught:
            driver.generate(prompt, logprobs=21)
        assert caught.value.field == "logprobs"


def test_biases_may_be_named_by_number(driver: Driver, client: TableClient) -> None:
    driver.generate("hi", max_tokens=1, logit_bias={7: 1.5, 3: -100})
    assert client.submitted[-1][1].logit_bias == ((3, -100), (7, 1.5))
    with pytest.raises(InvalidField) as caught:
        driver.generate("hi", logit_bias={True: 1})
    assert caught.value.field == "logit_bias"


def test_a_stream_is_the_completion_in_pieces(driver: Driver) -> None:
    [whole] = driver.generate("a", seed=2, max_tokens=30, policy="sd")
    chunks = list(driver.stream("a", seed=2, max_tokens=30, policy="sd"))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
    assert chunks[-1].finish_reason == whole.finish_reason
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])


async def test_async_and_sync_agree(driver: Driver) -> None:
    whole = await driver.agenerate(["a", "b"], seed=2, max_tokens=30)
    streamed = [chunk async for chunk in driver.astream("a", seed=2, max_tokens=30)]
    assert "".join(chunk.text for chunk in streamed) == whole[0].text
    synced = await asyncio.to_thread(driver.generate, ["a", "b"], seed=2, max_tokens=30)
    assert [item.token_ids for item in synced] == [item.token_ids for item in whole]


def test_leaving_a_stream_cancels_it(driver: Driver, client: TableClient) -> None:
    for _ in driver.stream("a", max_tokens=150, ignore_eos=True):
        break
    assert client.open == 0


async def test_cancelling_a_task_cancels_its_streams(driver: Driver, client: TableClient) -> None:
    client.gate = asyncio.Event()

    async def read() -> None:
        async with aclosing(driver.astream("a", max_tokens=150)) as chunks:
            async for _ in chunks:
                pass

    tasks = [asyncio.create_task(read()), asyncio.create_task(driver.agenerate(["a", "b"], max_tokens=150))]
    async with asyncio.timeout(10):
        while client.open < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while client.open:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_errors_name_the_field_and_end_the_rest(driver: Driver, client: TableClient) -> None:
    with pytest.raises(InvalidField, match=r"speculation\.policy"):
        driver.generate("a", policy="warp")
    with pytest.raises(InvalidField, match=r"^n: "):
        list(driver.stream("a", n=2))
    with pytest.raises(InvalidField, match=r"^prompt: "):
        driver.generate(["a", ""])
    assert client.open == 0


@pytest.mark.parametrize("prompt", [5, None, True, 0.5, {"role": "user", "content": "hi"}, b"hi", [5, "a"], [None]])
def test_whatever_is_no_prompt_is_refused_as_one(driver: Driver, prompt: Any) -> None:
    for ask in (driver.generate, lambda prompt: list(driver.stream(prompt))):
        with pytest.raises(InvalidField, match=r"^prompt(\[\d\])?: "):
            ask(prompt)


def test_a_full_fleet_is_asked_again(driver: Driver, client: TableClient) -> None:
    client.refusals = 2
    client.refusal = Overloaded("full", retry_after_s=0.01)
    assert len(driver.generate(["a", "b"], max_tokens=3)) == 2
    assert client.refusals == 0


def test_what_fails_to_open_is_closed(service: Service) -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[Service]:
        raise FleetError("no room")
        yield service

    driver = Driver(broken(), streams=1)
    with pytest.raises(FleetError, match="no room"):
        driver.start()
    assert not driver._thread.is_alive()
