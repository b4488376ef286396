"""The OpenAI endpoints as a FastAPI application over a Service.

Knows HTTP: bodies, statuses, server-sent events, clients that go away. Does not know Ray: the application is
the same under Ray Serve and in a test without a socket.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from distspec.errors import ModelNotServed, RequestError, Unavailable
from distspec.serving import responses, schema
from distspec.serving.responses import DONE, Envelope, Extras
from distspec.serving.results import Stats
from distspec.serving.schema import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions
from distspec.serving.service import Job, Service

MAX_BODY_BYTES = 8 << 20
"""JSON of this size is parsed in a tenth of a second or two. A thread would not help: the parser holds the GIL."""
CLIENT_GONE = 499
"""Status of an answer that nobody reads (as in nginx)."""

T = TypeVar("T")
log = logging.getLogger("distspec")


class Fleet(Protocol):
    """What the endpoints beside generation need of the fleet."""

    async def health(self) -> str | None:
        """None when requests can be served, else why not."""

    async def metrics(self) -> str:
        """Prometheus text. Raises Unavailable."""


class ClientGone(Exception):
    """The client closed its connection before the answer began."""


def create_app(service: Service, fleet: Fleet) -> FastAPI:
    app = FastAPI(title="distspec", description="OpenAI-compatible, with speculative decoding")
    created = int(time.time())
    limits = service.limits

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(responses.models(limits.model, created, limits.max_model_len))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != limits.model:
            raise ModelNotServed(name, [limits.model])
        return _json(responses.served_model(name, created, limits.max_model_len))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = schema.parse(CompletionRequest, await _body(request), limits)
        return await _answer(request, service, "completion", asked, await service.completion_jobs(asked))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = schema.parse(ChatRequest, await _body(request), limits)
        return await _answer(request, service, "chat", asked, await service.chat_jobs(asked))

    @app.get("/health")
    async def health() -> Response:
        reason = await fleet.health()
        if reason is not None:
            raise Unavailable(reason)
        return _json({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(await fleet.metrics(), media_type="text/plain; version=0.0.4")

    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(RecursionError, _on_depth)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
    return app


async def _answer(
    request: Request, service: Service, kind: responses.Kind, asked: GenerationRequest, jobs: Sequence[Job]
) -> Response:
    extras = Extras(
        spell=service.text.spell,
        logprobs=jobs[0].params.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        token_ids=bool(asked.return_token_ids),
        reader=jobs[0].reader,
    )
    envelope = Envelope.new(kind, service.limits.model, jobs[0].params.seed, asked.n or 1, extras)
    if not asked.stream:
        completions = await _while_connected(request, service.complete(jobs))
        # The logprobs of a long prompt take seconds to write down, in which other streams go on.
        return await asyncio.to_thread(lambda: _json(envelope.whole(completions)))
    events = _events(service, envelope, jobs, asked.stream_options or StreamOptions())
    # Awaiting the first event here gives a refusal (429, 503) its own status instead of a broken stream.
    try:
        first = await _while_connected(request, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)


async def _events(
    service: Service, envelope: Envelope, jobs: Sequence[Job], options: StreamOptions
) -> AsyncGenerator[bytes, None]:
    """Server-sent events of an answer: one for each message of the coordinator that brought text, or a token without
    any that is told of."""
    opened: set[int] = set()
    readers = [envelope.extras.reader() for _ in jobs]
    stats: dict[int, Stats] = {}
    made = [0] * len(jobs)
    try:
        async with aclosing(service.run(jobs)) as chunks:
            async for index, chunk in chunks:
                if chunk.stats is not None:
                    stats[index] = chunk.stats
                made[index] += len(chunk.token_ids)
                said = responses.read(readers[index], chunk)
                if said or chunk.finish_reason or envelope.extras.wanted:
                    if chunk.finish_reason is not None:
                        chunk = replace(chunk, finish_reason=readers[index].reason(chunk.finish_reason))
                    body = envelope.chunk(index, chunk, said, opens=index not in opened)
                    if options.include_usage:
                        known = responses.counts(len(jobs[index].prompt), made[index])
                        body["usage"] = known if options.continuous_usage_stats else None
                    opened.add(index)
                    yield responses.event(body)
    except RequestError as error:
        if not opened:
            raise
        # The status is out: the error becomes the last event, and no DONE follows.
        yield responses.event(responses.request_error(error))
        return
    if options.include_usage:
        yield responses.event(envelope.usage_chunk([stats[index] for index in range(len(jobs))]))
    yield DONE


class EventStream(Response):
    """Sends events as they come, and closes their generator when the client goes away.

    Both ways of learning of that are served: a disconnect message (as long as the server delivers one), and
    the cancellation of the request's task, which is how a proxy of Ray Serve says it.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _race(self._send(send), _disconnected(receive))
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled, and ClientGone raised, if the client goes away first."""
    result: list[T] = []

    async def run() -> None:
        result.append(await work)

    await _race(run(), _disconnected(request.receive))
    if not result:
        raise ClientGone
    return result[0]


async def _race(*contenders: Coroutine[Any, Any, None]) -> None:
    """Run until the first ends, cancel the others and wait for them; raises what the first raised."""
    tasks = [asyncio.create_task(contender) for contender in contenders]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception as error:
        # A server that lost the connection may say so this way (Ray Serve raises TaskCancelledError here).
        log.debug("no more messages from the client: %r", error)


async def _body(request: Request) -> object:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise HTTPException(415, f"content-type is {kind or 'missing'}, need application/json")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is over {MAX_BODY_BYTES} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(responses.encode(body), status, headers, "application/json")


async def _on_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {} if error.retry_after_s is None else {"retry-after": str(max(1, round(error.retry_after_s)))}
    return _json(responses.request_error(error), error.status, headers)


async def _on_depth(request: Request, _: Exception) -> Response:
    """JSON that could just be parsed may be too deep for whatever looks into it later."""
    return await _on_request_error(request, RequestError("the body is nested too deeply"))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = {
        404: f"no such path: {request.url.path}",
        405: f"{request.method} is not allowed here, need {', '.join((error.headers or {}).values())}",
    }.get(status, error.detail)
    code = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 415: "unsupported_media_type"}
    return _json(responses.error(status, message, code.get(status, "http_error")), status, dict(error.headers or {}))


async def _on_client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _on_bug(_: Request, error: Exception) -> Response:
    log.error("a request failed inside the server", exc_info=error)
    return _json(responses.error(500, "internal error; the server's log says more", "internal_error"), 500)
