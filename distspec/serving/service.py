"""From a checked request to streams of text: the one path of HTTP and driver alike.

Knows requests, text and a client of the coordinator. Does not know HTTP, Ray, or where tokens come from.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, cast

from distspec.errors import InvalidField, Unavailable
from distspec.protocol.messages import Output
from distspec.protocol.values import SamplingParams, SpeculationChoice, Usage
from distspec.serving import schema
from distspec.serving.results import Chunk, Completion, stats
from distspec.serving.schema import ChatRequest, CompletionRequest, GenerationRequest, Limits
from distspec.serving.text import Decoder, Text


class Submitter(Protocol):
    """What serving needs of a client of the coordinator (`workers.client.Client`)."""

    def submit(
        self, prompt: tuple[int, ...], params: SamplingParams, speculation: SpeculationChoice
    ) -> AsyncIterator[Output]:
        """Outputs of one stream, an async generator: closing it cancels the stream. Raises RequestError."""


@dataclass(frozen=True, slots=True)
class Job:
    """One stream to generate: a prompt and one of its n choices."""

    prompt: tuple[int, ...]
    params: SamplingParams
    speculation: SpeculationChoice
    stops: tuple[str, ...] = ()


class Service:
    """Generates text. stop_ids of the text end every answer unless the request says ignore_eos."""

    def __init__(self, client: Submitter, text: Text, limits: Limits) -> None:
        self.text = text
        self.limits = limits
        self._client = client

    async def completion_jobs(self, request: CompletionRequest) -> list[Job]:
        """Jobs of each prompt in order, its n choices together. Raises InvalidField."""
        found = schema.prompts(request.prompt, self.limits)
        self._check_streams("prompt", len(found), request)
        ids = [await asyncio.to_thread(self.text.encode, item) if isinstance(item, str) else item for item in found]
        many = isinstance(request.prompt, list) and not isinstance(request.prompt[0], int)
        return self._jobs(request, [(f"prompt[{i}]" if many else "prompt", item) for i, item in enumerate(ids)])

    async def chat_jobs(self, request: ChatRequest) -> list[Job]:
        """Jobs of the n choices of a conversation. Raises InvalidField."""
        turns = schema.turns(request.messages, self.limits)
        self._check_streams("n", 1, request)
        return self._jobs(request, [("messages", await asyncio.to_thread(self.text.chat, turns))])

    async def stream(self, job: Job) -> AsyncGenerator[Chunk, None]:
        """Chunks of one job, the last with a finish_reason. Closing it cancels the job. Raises RequestError."""
        decoder = Decoder(self.text, job.stops)
        start = time.perf_counter()
        first: float | None = None
        count = 0
        reason: str | None = None
        usage: Usage | None = None
        outputs = cast(AsyncGenerator[Output, None], self._client.submit(job.prompt, job.params, job.speculation))
        async with aclosing(outputs):
            async for output in outputs:
                text, taken, stopped = decoder.push(output.tokens, last=output.finish_reason is not None)
                count += taken
                if taken and first is None:
                    first = time.perf_counter() - start
                reason, usage = "stop" if stopped else output.finish_reason, output.usage or usage
                tokens = output.tokens[:taken]
                if reason is not None:
                    break
                if tokens:
                    yield Chunk(text, tokens)
        # By now the stream is closed at the coordinator, also where only a stop string ended it.
        if reason not in ("stop", "length"):
            raise Unavailable(f"the stream was ended by the fleet ({reason or 'no final message'})")
        total = time.perf_counter() - start
        measured = stats(
            usage,
            prompt_tokens=len(job.prompt),
            completion_tokens=count,
            first_token_s=total if first is None else first,
            total_s=total,
        )
        yield Chunk(text, tokens, reason, measured)

    async def run(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Chunks of several jobs as they come, with the index of their job.

        All jobs are submitted at once. The first error ends all of them; so does closing the generator.
        """
        arrived: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue()

        async def pump(index: int, job: Job) -> None:
            try:
                async with aclosing(self.stream(job)) as chunks:
                    async for chunk in chunks:
                        arrived.put_nowait((index, chunk))
            except Exception as error:
                arrived.put_nowait((index, error))

        tasks = [asyncio.create_task(pump(index, job)) for index, job in enumerate(jobs)]
        try:
            left = len(jobs)
            while left:
                index, chunk = await arrived.get()
                if isinstance(chunk, Exception):
                    raise chunk
                left -= chunk.finish_reason is not None
                yield index, chunk
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def complete(self, jobs: Sequence[Job]) -> list[Completion]:
        """Whole answers, in the order of the jobs. The first error ends all of them."""
        texts: list[list[str]] = [[] for _ in jobs]
        tokens: list[list[int]] = [[] for _ in jobs]
        done: dict[int, Completion] = {}
        async with aclosing(self.run(jobs)) as chunks:
            async for index, chunk in chunks:
                texts[index].append(chunk.text)
                tokens[index].extend(chunk.token_ids)
                if chunk.finish_reason is not None and chunk.stats is not None:
                    params = jobs[index].params
                    done[index] = Completion(
                        "".join(texts[index]),
                        tuple(tokens[index]),
                        chunk.finish_reason,
                        params.seed,
                        params.choice,
                        chunk.stats,
                    )
        return [done[index] for index in range(len(jobs))]

    def _check_streams(self, field: str, prompts: int, request: GenerationRequest) -> None:
        count = prompts * (request.n or 1)
        if count > self.limits.max_streams:
            raise InvalidField(field, count, f"at most {self.limits.max_streams} answers (prompts x n) in one request")

    def _jobs(self, request: GenerationRequest, prompts: Sequence[tuple[str, tuple[int, ...]]]) -> list[Job]:
        seed = secrets.randbits(48) if request.seed is None else request.seed
        choice = request.speculation or schema.SpeculationField()
        speculation = SpeculationChoice(policy=choice.policy, num_speculative_tokens=choice.num_speculative_tokens)
        stop_ids = set(request.stop_token_ids or ())
        if not request.ignore_eos:
            stop_ids.update(self.text.stop_ids)
        jobs = []
        for field, prompt in prompts:
            max_tokens = self._max_tokens(request, field, len(prompt))
            for index in range(request.n or 1):
                params = _sampling(request, seed, index, max_tokens, tuple(sorted(stop_ids)))
                jobs.append(Job(prompt, params, speculation, schema.stops(request)))
        return jobs

    def _max_tokens(self, request: GenerationRequest, field: str, length: int) -> int:
        limit = self.limits.max_model_len
        room = limit - length
        if length == 0:
            raise InvalidField(field, "", "at least one token")
        schema.check_length(field, length, self.limits)
        name, asked = schema.max_tokens(request)
        if asked is None:
            return min(self.limits.default_max_tokens, room)
        if asked > room:
            raise InvalidField(name, asked, f"at most {room} (max_model_len {limit}, the prompt has {length} tokens)")
        return asked


def _sampling(
    request: GenerationRequest, seed: int, choice: int, max_tokens: int, stop_ids: tuple[int, ...]
) -> SamplingParams:
    temperature = 1.0 if request.temperature is None else request.temperature
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        choice=choice,
        temperature=0.0 if temperature < schema.MIN_TEMPERATURE else temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        stop_token_ids=stop_ids,
    )
