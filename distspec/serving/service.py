"""From a checked request to streams of text: the one path of HTTP and driver alike.

Knows requests, text and a client of the coordinator. Does not know HTTP, Ray, or where tokens come from.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, cast

from msgspec import structs

from distspec.constraints.trial import Trials
from distspec.errors import BadConstraint, InvalidField, RequestError, Unavailable
from distspec.protocol.messages import Output
from distspec.protocol.values import SamplingParams, SpeculationChoice, TokenLogprobs, Usage
from distspec.serving import prompts, sampling, schema, structure, tools
from distspec.serving.calls import Plain, Reader
from distspec.serving.limits import Limits, check_length
from distspec.serving.pieces import Pieces
from distspec.serving.results import Chunk, Completion, PromptReport, stats
from distspec.serving.schema import ChatRequest, CompletionRequest, GenerationRequest
from distspec.serving.structure import Asked
from distspec.serving.text import Decoder, Text, spelled
from distspec.serving.tools import NO_TOOLS, Choice


class Submitter(Protocol):
    """What serving needs of a client of the coordinator (`workers.client.Client`)."""

    def submit(
        self, prompt: tuple[int, ...], params: SamplingParams, speculation: SpeculationChoice
    ) -> AsyncIterator[Output]:
        """Outputs of one stream, an async generator: closing it cancels the stream. Raises RequestError."""


@dataclass(frozen=True, slots=True)
class Job:
    """One stream to generate: a prompt and one of its n choices. stops: strings that end its text; stop_ids: tokens
    that do, beside the model's own. echo: with which the text begins, and where in it each token of the prompt does.
    is_empty: no token is asked for, so the one that workers make is left out. reader: makes what finds calls of tools
    in its text. form: the field that asks for its constraint."""

    prompt: tuple[int, ...]
    params: SamplingParams
    speculation: SpeculationChoice
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    echo: tuple[str, tuple[int, ...]] = ("", ())
    stop_ids: frozenset[int] = frozenset()
    is_empty: bool = False
    reader: Callable[[], Reader] = Plain
    form: str = "constraint"

    def pieces(self, text: Text) -> Pieces:
        return Pieces(self.decoder(text), PromptReport(self.prompt, *self.echo), self.stop_ids)

    def decoder(self, text: Text) -> Decoder:
        """As in vLLM, what ends the answer is part of its text only if that is asked for, string or token."""
        return Decoder(
            text,
            self.stops,
            silent=() if self.include_stop else self.params.stop_token_ids,
            min_tokens=self.params.min_tokens,
            include_stop=self.include_stop,
        )


class Service:
    """Generates text. stop_ids of the text end every answer unless the request says ignore_eos. trials: where
    constraints are tried before workers see them; without, there are none."""

    def __init__(self, client: Submitter, text: Text, limits: Limits, trials: Trials | None = None) -> None:
        self.text = text
        self.limits = limits
        self._trials = trials
        self._client = client

    def prepare(self) -> None:
        """Begin what takes seconds and only some requests need, so that the first of them does not wait for it. For
        servers: most scripts end without such a request."""
        if self._trials is not None:
            self._trials.start()

    async def completion_jobs(self, request: CompletionRequest) -> list[Job]:
        """Jobs of each prompt in order, its n choices together. Raises InvalidField."""
        keep = sampling.prompt_room(request, self.limits)
        found = prompts.prompts(request.prompt, self.limits, keep)
        self._check_streams("prompt", len(found), request)
        many = isinstance(request.prompt, list) and not isinstance(request.prompt[0], int)
        named = [(f"prompt[{i}]" if many else "prompt", item) for i, item in enumerate(found)]
        texts = [
            (field, await asyncio.to_thread(self._tokens, field, item, keep) if isinstance(item, str) else item)
            for field, item in named
        ]
        return await self._jobs(request, texts)

    async def chat_jobs(self, request: ChatRequest) -> list[Job]:
        """Jobs of the n choices of a conversation. Raises InvalidField."""
        turns = prompts.turns(request.messages, self.limits)
        self._check_streams("n", 1, request)
        options = prompts.template_options(request)
        # Tools of megabytes are looked through for a second, in which other streams go on.
        choice = await asyncio.to_thread(tools.choice, request)
        said = await asyncio.to_thread(self.text.render, turns, choice.tools, options)
        keep = sampling.prompt_room(request, self.limits)
        prompt = await asyncio.to_thread(self._tokens, "messages", said, keep, is_chat=True)
        return await self._jobs(request, [("messages", prompt)], choice)

    async def stream(self, job: Job) -> AsyncGenerator[Chunk, None]:
        """Chunks of one job, the last with a finish_reason. Closing it cancels the job. Raises RequestError."""
        pieces = job.pieces(self.text)
        start = time.perf_counter()
        first: float | None = None
        chunk: Chunk | None = None
        usage: Usage | None = None
        outputs = cast(AsyncGenerator[Output, None], self._client.submit(job.prompt, job.params, job.speculation))
        async with aclosing(outputs), _named(job.form):
            async for output in outputs:
                if job.is_empty:
                    output = _emptied(output)
                chunk, usage = pieces.push(output), output.usage or usage
                if pieces.count and first is None:
                    first = time.perf_counter() - start
                if chunk is not None and chunk.finish_reason is not None:
                    break
                if chunk is not None:
                    yield chunk
        # By now the stream is closed at the coordinator, also where only a stop string ended it.
        if chunk is None or chunk.finish_reason not in ("stop", "length"):
            reason = chunk.finish_reason if chunk is not None else None
            raise Unavailable(f"the stream was ended by the fleet ({reason or 'no final message'})")
        total = time.perf_counter() - start
        measured = stats(
            usage,
            prompt_tokens=len(job.prompt),
            completion_tokens=pieces.count,
            first_token_s=total if first is None else first,
            total_s=total,
        )
        yield replace(chunk, stats=measured)

    async def run(self, jobs: Sequence[Job]) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Chunks of several jobs as they come, with the index of their job.

        All jobs are submitted at once; the choices of a prompt stand together, in order. The first error ends all of
        them; so does closing the generator.
        """
        arrived: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue()
        # Logprobs of a prompt come with its first choice alone; the others wait for them.
        shared: list[asyncio.Future[tuple[TokenLogprobs, ...]]] = [asyncio.Future() for _ in jobs]
        leads = _leads(jobs)

        async def complete(index: int, chunk: Chunk) -> Chunk:
            first = leads[index]
            if chunk.prompt is None or jobs[first].params.prompt_logprobs is None:
                return chunk
            if first == index:
                shared[index].set_result(chunk.prompt.logprobs)
                return chunk
            return replace(chunk, prompt=replace(chunk.prompt, logprobs=await shared[first]))

        async def pump(index: int, job: Job) -> None:
            try:
                async with aclosing(self.stream(job)) as chunks:
                    async for chunk in chunks:
                        arrived.put_nowait((index, await complete(index, chunk)))
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
        found: list[list[Chunk]] = [[] for _ in jobs]
        async with aclosing(self.run(jobs)) as chunks:
            async for index, chunk in chunks:
                found[index].append(chunk)
        return [_joined(*pair) for pair in zip(found, jobs, strict=True)]

    def _tokens(self, field: str, text: str, keep: int | None, *, is_chat: bool = False) -> tuple[int, ...]:
        """Of a prompt. One of which it is plain that it is too long is not tokenized, unless its end is kept. Raises
        InvalidField."""
        if keep is None:
            check_length(field, self.text.fewest(text), self.limits)
        return self.text.encode(text, add_special_tokens=not is_chat)

    def _check_streams(self, field: str, count: int, request: GenerationRequest) -> None:
        count *= request.n or 1
        if count > self.limits.max_streams:
            raise InvalidField(field, count, f"at most {self.limits.max_streams} answers (prompts x n) in one request")

    async def _asked(self, request: GenerationRequest, choice: Choice) -> Asked | None:
        """What the output must be, once it is known that workers can compile it. Raises InvalidField, Unavailable."""
        asked = await asyncio.to_thread(structure.asked, request, choice, self.limits.tool_call_parser)
        if asked is None:
            return None
        if self._trials is None:
            raise InvalidField(asked.field, asked.constraint.kind, "nothing; there are no constraints here")
        try:
            await asyncio.wrap_future(self._trials.submit(asked.constraint))
        except BadConstraint as error:
            raise RequestError(f"{asked.field}: {error}", asked.field) from None
        return asked

    async def _jobs(
        self, request: GenerationRequest, texts: Sequence[tuple[str, tuple[int, ...]]], choice: Choice = NO_TOOLS
    ) -> list[Job]:
        """texts: the prompts, each with the field that holds it. choice: of tools."""
        seed = secrets.randbits(48) if request.seed is None else request.seed
        asked = request.speculation or schema.SpeculationField()
        speculation = SpeculationChoice(policy=asked.policy, num_speculative_tokens=asked.num_speculative_tokens)
        words = request.bad_words
        banned = await asyncio.to_thread(sampling.bad_words, words, self.text, self.limits) if words else ()
        keep = sampling.prompt_room(request, self.limits)
        reader = choice.reader(self.limits.tool_call_parser)
        own = frozenset(() if request.ignore_eos else self.text.stop_ids)
        known: Counter[tuple[int, ...]] = Counter()  # choices so far; a prompt that comes again has further ones
        jobs = []
        for field, prompt in texts:
            kept = prompt if keep is None else prompt[-keep:]
            echo = await self._echo(request, kept) if request.echo else ("", ())
            params = sampling.resolve(
                request,
                seed=seed,
                field=field,
                prompt_tokens=len(kept),
                bad_words=banned,
                stop_ids=self.text.stop_ids,
                limits=self.limits,
            )
            first = known[kept]
            known[kept] += request.n or 1
            jobs += [
                Job(
                    kept,
                    _of_choice(params, index, index - first),
                    speculation,
                    schema.stops(request),
                    bool(request.include_stop_str_in_output),
                    echo,
                    frozenset(request.stop_token_ids or ()) - own,
                    is_empty=schema.max_tokens(request)[1] == 0,
                    reader=reader,
                )
                for index in range(first, known[kept])
            ]
        # Last: a trial takes time of a child that others wait for, and most that is wrong with a request is known here.
        form = await self._asked(request, choice)
        if form is None:
            return jobs
        return [
            replace(job, params=structs.replace(job.params, constraint=form.constraint), form=form.field)
            for job in jobs
        ]

    async def _echo(self, request: GenerationRequest, prompt: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """See Job. Of a chat, what the assistant has said already, of which there are no tokens apart."""
        if isinstance(request, ChatRequest):
            last = prompts.turns(request.messages, self.limits)[-1]
            return last["content"] if last["role"] == "assistant" else "", ()
        return await asyncio.to_thread(spelled, self.text, prompt)


@asynccontextmanager
async def _named(field: str) -> AsyncIterator[None]:
    """To workers a constraint is a constraint, whichever field of a request asks for it."""
    try:
        yield
    except RequestError as error:
        if error.field != "constraint":
            raise
        raise RequestError(field + error.message.removeprefix(error.field), field) from None


def _of_choice(params: SamplingParams, choice: int, after: int) -> SamplingParams:
    """Logprobs of a prompt are computed once, for the choice after which the others stand: see Service.run."""
    return structs.replace(params, choice=choice, prompt_logprobs=None if after else params.prompt_logprobs)


def _leads(jobs: Sequence[Job]) -> list[int]:
    """Of each job, the one that is told the logprobs of their prompt, if any is."""
    found: list[int] = []
    for index, job in enumerate(jobs):
        found.append(found[-1] if found and job.params.prompt_logprobs is None else index)
    return found


def _emptied(output: Output) -> Output:
    """An answer of no tokens, however the one that was made would have ended it."""
    reason = "length" if output.finish_reason == "stop" else output.finish_reason
    return structs.replace(output, tokens=(), logprobs=(), finish_reason=reason)


def _joined(chunks: Sequence[Chunk], job: Job) -> Completion:
    """All chunks of a job, in order."""
    first, last = chunks[0], chunks[-1]
    assert last.finish_reason is not None
    assert last.stats is not None
    assert first.prompt is not None
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        seed=job.params.seed,
        choice=job.params.choice,
        stats=last.stats,
        prompt=first.prompt,
        logprobs=tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        offsets=tuple(chain.from_iterable(chunk.offsets for chunk in chunks)),
    )
