"""A client of a fleet: streams of tokens that outlive the coordinator.

Knows each open stream's prompt, parameters and committed tokens, so that it can hand the rest of the stream to
the next coordinator; the coupled noise makes the continuation the same. Does not know text, HTTP or Ray.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from distspec.errors import FleetError, LinkLost, RequestError, Unavailable, request_error
from distspec.protocol.channel import Link
from distspec.protocol.keys import Endpoint
from distspec.protocol.messages import PROTOCOL_VERSION, Cancel, ClientHello, Message, Output, Submit
from distspec.protocol.values import SamplingParams, SpeculationChoice

log = logging.getLogger(__name__)
_RETRY_S = 0.2


class _Stream:
    def __init__(self, key: str, prompt: tuple[int, ...], params: SamplingParams, choice: SpeculationChoice) -> None:
        self.key = key
        self.tokens: list[int] = []
        self.outputs: asyncio.Queue[Output | RequestError] = asyncio.Queue()
        self._prompt, self._params, self._choice = prompt, params, choice

    def submit(self) -> Submit:
        return Submit(
            key=self.key,
            prompt=self._prompt,
            params=self._params,
            emitted=tuple(self.tokens),
            speculation=self._choice,
        )

    def take(self, output: Output) -> bool:
        """Pass an output on; False if it does not continue the stream, which is then over."""
        if output.error:  # whatever it still wanted to say before, this is why it says no more
            self.outputs.put_nowait(request_error(*output.error))
            return True
        if output.start != len(self.tokens):
            reason = f"the stream broke at token {len(self.tokens)}: what came begins at {output.start}"
            self.outputs.put_nowait(Unavailable(reason))
            return False
        self.tokens += output.tokens
        self.outputs.put_nowait(output)
        return True


class Client:
    """Submits requests to the coordinator that `find` names at the time.

    find: asks the fleet for the present endpoint; may raise or be slow while there is none.
    timeout_s: silence after which a coordinator counts as gone. patience_s: how long open streams wait for
    the next one before they fail with Unavailable.
    """

    def __init__(
        self, find: Callable[[], Awaitable[Endpoint]], *, timeout_s: float = 10.0, patience_s: float = 60.0
    ) -> None:
        self.name = f"client:{uuid.uuid4().hex}"
        self._find = find
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._streams: dict[str, _Stream] = {}
        self._keys = 0
        self._incarnation = 0
        self._link: Link | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._trouble = "not started"
        self._hopeless = False

    async def start(self) -> None:
        """Raises FleetError if no coordinator takes this client within patience_s."""
        self._connecting = asyncio.create_task(self._connect())
        done, _ = await asyncio.wait({self._connecting}, timeout=self._patience_s)
        if not done:
            await self.close()
            raise FleetError(f"no coordinator answered within {self._patience_s:g} s: {self._trouble}")

    async def close(self) -> None:
        """End all streams; the coordinator frees their work."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._link is not None:
            self._link.close()
            self._link = None
        self._trouble, self._hopeless = "the client was closed", True
        self._fail(self._trouble)

    async def submit(
        self, prompt: Sequence[int], params: SamplingParams, speculation: SpeculationChoice | None = None
    ) -> AsyncGenerator[Output, None]:
        """Outputs of one stream, in order and without gaps, up to the one with a finish_reason.

        Closing the generator cancels the request. Raises RequestError: what the coordinator refused, or
        Unavailable.
        """
        self._keys += 1
        stream = _Stream(str(self._keys), tuple(prompt), params, speculation or SpeculationChoice())
        if self._hopeless:
            raise Unavailable(f"no coordinator: {self._trouble}")
        self._streams[stream.key] = stream
        if self._link is not None:
            self._link.send(stream.submit())
        ended = False
        try:
            while not ended:
                output = await stream.outputs.get()
                if isinstance(output, RequestError):
                    ended = True
                    raise output
                ended = output.finish_reason is not None
                yield output
        finally:
            self._streams.pop(stream.key, None)
            if not ended and self._link is not None:
                self._link.send(Cancel(key=stream.key))

    def _arrived(self, messages: list[Message]) -> None:
        for message in messages:
            if not isinstance(message, Output) or message.key not in self._streams:
                continue  # of a stream that was closed here meanwhile
            if not self._streams[message.key].take(message):
                self._streams.pop(message.key)
                if self._link is not None:
                    self._link.send(Cancel(key=message.key))

    def _lost(self, error: LinkLost) -> None:
        if self._link is None:
            return  # lost while it was being opened: whoever opens it sees that
        log.warning("link to the coordinator lost: %s", error)
        self._link = None
        self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        """Find a coordinator and hand it the rest of all streams. After patience_s they fail; the search goes on."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._patience_s
        while self._link is None:
            try:
                await self._join()
            except Exception as error:  # whatever ails Ray or the network, open streams depend on this search
                self._trouble = str(error) or type(error).__name__
                log.info("no coordinator yet: %s", self._trouble)
                if clock() > deadline:
                    self._hopeless = True
                    self._fail(f"no coordinator: {self._trouble}")
                await asyncio.sleep(_RETRY_S)

    async def _join(self) -> None:
        endpoint = await asyncio.wait_for(self._find(), self._timeout_s)
        self._incarnation += 1
        hello = ClientHello(client=self.name, version=PROTOCOL_VERSION)
        link = Link(
            endpoint, hello, self._incarnation, arrived=self._arrived, lost=self._lost, timeout_s=self._timeout_s
        )
        await link.open()
        if not link.is_open:
            raise LinkLost("lost as soon as it was open")
        self._link, self._hopeless = link, False
        for stream in self._streams.values():
            link.send(stream.submit())

    def _fail(self, reason: str) -> None:
        for stream in self._streams.values():
            stream.outputs.put_nowait(Unavailable(reason))
        self._streams.clear()
