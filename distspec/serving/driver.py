"""Generating from a Python script, without HTTP.

Knows a Service on an event loop in a thread of its own, so that scripts with and without a loop use the same
code. Does not know where the service comes from (`serving.connect`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from typing import Any, Self, TypedDict, TypeVar, Unpack

from distspec.errors import InvalidField, Overloaded
from distspec.serving import schema
from distspec.serving.limits import between
from distspec.serving.results import Chunk, Completion
from distspec.serving.schema import ChatRequest, CompletionRequest
from distspec.serving.service import Job, Service

T = TypeVar("T")
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Raw text, token ids, or the messages of a chat."""


class Params(TypedDict, total=False):
    """How to generate; fields mean what they mean over HTTP. policy and num_speculative_tokens: speculation.

    logprobs: how many of the likeliest tokens are reported at each token of the answer, also of a chat. tools and what
    follows it: of a chat. Calls of tools are told as the model writes them, in the text (as vLLM's LLM.chat has it).
    """

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: list[int]
    bad_words: list[str]
    seed: int
    n: int
    stop: str | list[str]
    stop_token_ids: list[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    truncate_prompt_tokens: int
    logprobs: int
    prompt_logprobs: int
    echo: bool
    response_format: Mapping[str, Any]
    structured_outputs: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    policy: str
    num_speculative_tokens: int


class Driver:
    """Generates with the service that `opens` yields, between `start` and `close` (or `with`, `async with`).

    streams: prompts that are sent at once; further ones wait here. All methods may be called from any thread,
    and the async ones from any loop. They raise RequestError, which names the field at fault.
    """

    def __init__(self, opens: AbstractAsyncContextManager[Service], streams: int) -> None:
        self._opens = opens
        self._gate = asyncio.Semaphore(streams)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="distspec-driver", daemon=True)
        self._stack = AsyncExitStack()
        self._service: Service | None = None

    def generate(self, prompts: Prompt | Sequence[Prompt], **params: Unpack[Params]) -> list[Completion]:
        """Whole answers: those of the first prompt (params["n"] of them), then of the second, and so on."""
        return self._wait(self._generate(_several(prompts), params))

    def stream(self, prompt: Prompt, **params: Unpack[Params]) -> Iterator[Chunk]:
        """Pieces of one answer as they come. Leaving the loop early cancels the rest."""
        chunks = _Pull(self._stream(prompt, params))
        try:
            while (chunk := self._wait(chunks.next())) is not None:
                yield chunk
        finally:
            self._wait(chunks.close())

    async def agenerate(self, prompts: Prompt | Sequence[Prompt], **params: Unpack[Params]) -> list[Completion]:
        """As `generate`, awaited. To cancel it cancels what it asked for."""
        return await self._await(self._generate(_several(prompts), params))

    async def astream(self, prompt: Prompt, **params: Unpack[Params]) -> AsyncGenerator[Chunk, None]:
        """As `stream`, awaited. What is left is cancelled where the generator is closed (`contextlib.aclosing`)."""
        chunks = _Pull(self._stream(prompt, params))
        try:
            while (chunk := await self._await(chunks.next())) is not None:
                yield chunk
        finally:
            await self._await(chunks.close())

    def start(self) -> None:
        """Open the service, and block until it is there. Once; a driver that was closed does not start again. Raises
        what opening it raises, and is closed then."""
        self._thread.start()
        try:
            self._service = self._wait(self._stack.enter_async_context(self._opens))
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """End the service and the driver's thread, and block until both have. Once, started or not."""
        if self._thread.is_alive():
            try:
                self._wait(self._stack.aclose())
            finally:
                self._end()
        else:
            self._loop.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    # -- on the driver's own loop ----------------------------------------------------------------

    async def _generate(self, prompts: Sequence[Prompt], params: Params) -> list[Completion]:
        tasks = [asyncio.create_task(self._complete(prompt, params)) for prompt in prompts]
        try:
            return [completion for completions in await asyncio.gather(*tasks) for completion in completions]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _complete(self, prompt: Prompt, params: Params) -> list[Completion]:
        jobs = await self._jobs(prompt, params)
        async with self._gate:
            while True:
                try:
                    return await self._running().complete(jobs)
                except Overloaded as full:  # by others; this driver alone keeps below the limit
                    await asyncio.sleep(full.retry_after_s or 1.0)

    async def _stream(self, prompt: Prompt, params: Params) -> AsyncGenerator[Chunk, None]:
        if params.get("n", 1) != 1:
            raise InvalidField("n", params["n"], "1 for a stream")
        [job] = await self._jobs(prompt, params)
        async with aclosing(self._running().stream(job)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _jobs(self, prompt: Prompt, params: Params) -> list[Job]:
        service = self._running()
        body: dict[str, Any] = dict(params)
        speculation = {name: body.pop(name) for name in ("policy", "num_speculative_tokens") if name in body}
        if speculation:
            body["speculation"] = speculation
        if _is_chat(prompt):
            body |= _chat_logprobs(params)
            chat = schema.parse(ChatRequest, body | {"messages": prompt}, service.limits)
            return await service.chat_jobs(chat)
        completion = schema.parse(CompletionRequest, body | {"prompt": prompt}, service.limits)
        return await service.completion_jobs(completion)

    def _running(self) -> Service:
        if self._service is None:
            raise RuntimeError("not started: use `with Fleet(...) as fleet`")
        return self._service

    # -- from other threads and loops --------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # of no effect unless the wait was interrupted
            raise

    async def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _end(self) -> None:
        self._service = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Pull:
    """A stream asked for one piece at a time from elsewhere; an interrupted ask ends before the stream is closed."""

    def __init__(self, chunks: AsyncGenerator[Chunk, None]) -> None:
        self._chunks = chunks
        self._lock = asyncio.Lock()

    async def next(self) -> Chunk | None:
        async with self._lock:
            return await anext(self._chunks, None)

    async def close(self) -> None:
        async with self._lock:
            await self._chunks.aclose()


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _chat_logprobs(params: Params) -> dict[str, Any]:
    """A number of logprobs as the chat endpoint spells it."""
    count = params.get("logprobs")
    if not isinstance(count, int) or isinstance(count, bool):
        return {}
    between("logprobs", count, 0, schema.MAX_LOGPROBS)
    return {"logprobs": True, "top_logprobs": count}


def _several(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """A list of prompts, where one alone is allowed too: text, ids and messages are each one prompt. So is what is no
    list at all, and is refused as a prompt."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    found = list(prompts)
    return [prompts] if found and isinstance(found[0], int | Mapping) else found
