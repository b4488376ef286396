"""A service whose client answers from a table instead of a fleet."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from distspec.constraints.trial import Trials
from distspec.errors import RequestError
from distspec.protocol.codec import pack_logprobs
from distspec.protocol.messages import Output
from distspec.protocol.values import SamplingParams, SpeculationChoice, TokenLogprobs, Usage, finish_reason
from distspec.serving.limits import Limits
from distspec.serving.service import Service
from distspec.serving.text import Text
from tests.words import byte_fallback, byte_level


def logprobs_of(tokens: Sequence[int], most: int | None, vocab_size: int) -> tuple[TokenLogprobs, ...]:
    """A token's rank is what is left of it by seven, and those after it are likelier; nothing if most is None."""
    if most is None:
        return ()
    return tuple(
        TokenLogprobs(
            logprob=-1.0 - token % 7,
            rank=1 + token % 7,
            top=tuple(((token + token % 7 - i) % vocab_size, -1.0 - i) for i in range(most)),
        )
        for token in tokens
    )


class TableClient:
    """Answers with random tokens that depend on (prompt, seed, choice), in runs of 1 to 4.

    open: streams that were neither finished nor cancelled. gate: each output waits for it. answers: token
    streams to give instead, by prompt. refusal: raised instead of the first output; breaks_at: instead of a
    later one. refusals: how many submissions are refused (None: all).
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.open = 0
        self.submitted: list[tuple[tuple[int, ...], SamplingParams, SpeculationChoice]] = []
        self.gate: asyncio.Event | None = None
        self.answers: dict[tuple[int, ...], list[int]] = {}
        self.refusal: RequestError | None = None
        self.refusals: int | None = None
        self.breaks_at: int | None = None

    async def submit(
        self, prompt: tuple[int, ...], params: SamplingParams, speculation: SpeculationChoice
    ) -> AsyncIterator[Output]:
        self.submitted.append((prompt, params, speculation))
        self.open += 1
        try:
            if self.refusal is not None and self.breaks_at is None and self.refusals != 0:
                self.refusals = None if self.refusals is None else self.refusals - 1
                raise self.refusal
            draws = random.Random(repr((prompt, params.seed, params.choice)))
            given = self.answers.get(prompt)
            emitted, reason = 0, None
            while reason is None:
                if self.gate is not None:
                    await self.gate.wait()
                if self.refusal is not None and self.breaks_at is not None and emitted >= self.breaks_at:
                    raise self.refusal
                start, run = emitted, []
                for _ in range(draws.randint(1, 4)):
                    token = given[emitted] if given else draws.randrange(self.vocab_size)
                    run.append(token)
                    emitted += 1
                    reason = finish_reason(params, emitted, token)
                    if reason or (given and emitted == len(given)):
                        reason = reason or "stop"
                        break
                usage = Usage(prompt_tokens=len(prompt), completion_tokens=emitted, rounds=emitted, policy="ar")
                yield Output(
                    key="k",
                    start=start,
                    tokens=tuple(run),
                    finish_reason=reason,
                    usage=usage,
                    logprobs=logprobs_of(run, params.logprobs, self.vocab_size),
                    prompt_logprobs=b""
                    if start
                    else pack_logprobs(logprobs_of(prompt[1:], params.prompt_logprobs, self.vocab_size)),
                )
                await asyncio.sleep(0)
        finally:
            self.open -= 1


@pytest.fixture(scope="session")
def text() -> Text:
    return Text(byte_level())


@pytest.fixture(scope="session")
def fallback_text() -> Text:
    return Text(byte_fallback())


@pytest.fixture
def client(text: Text) -> TableClient:
    return TableClient(vocab_size=300)


@pytest.fixture(scope="session")
def limits() -> Limits:
    return Limits(
        model="tiny",
        vocab_size=350,
        max_model_len=200,
        default_max_tokens=20,
        max_n=4,
        max_streams=12,
        max_nodes=16,
        policies=("ar", "sd"),
    )


@pytest.fixture(scope="session")
def trials(limits: Limits, text: Text, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trials]:
    """Real ones, with less patience."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level().save_pretrained(folder)
    found = Trials(folder, limits.vocab_size, text.stop_ids, limit_s=2.0)
    yield found
    found.close()


@pytest.fixture
def service(client: TableClient, text: Text, limits: Limits, trials: Trials) -> Service:
    return Service(client, text, limits, trials)
