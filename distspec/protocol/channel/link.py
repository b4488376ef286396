"""A worker's or client's end of its link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from distspec.errors import BadMessage, LinkLost
from distspec.protocol.channel.pump import MAX_QUEUED_FRAMES, Pulse, Pump, end, heard_again, limit
from distspec.protocol.codec import decode_head, decode_messages, encode_all
from distspec.protocol.keys import Endpoint
from distspec.protocol.messages import (
    ClientHello,
    ClientWelcome,
    Heartbeat,
    Hello,
    Message,
    Refuse,
    Welcome,
)


class Link:
    """One life of a worker or client in a fleet.

    arrived: the messages of a frame, heartbeats taken out. lost: told once, and never after `close`. Both are
    called on the event loop that called `open`; they may be called before `open` returns to its caller.

    wake: of a thread that receives by itself what comes after the Welcome, so that nothing has to be handed on to it:
    it calls `receive` when `descriptor` is readable and when it was woken, and `arrived` is called there. While it
    is busy the event loop receives with each heartbeat, so silence is told all the same.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        hello: Hello | ClientHello,
        incarnation: int,
        *,
        arrived: Callable[[list[Message]], None],
        lost: Callable[[LinkLost], None],
        timeout_s: float,
        wake: Callable[[], None] | None = None,
    ) -> None:
        self.incarnation = incarnation
        self.heard_s = 0.0
        """Event loop time of the coordinator's last frame."""
        self._endpoint = endpoint
        self._hello = hello
        self._arrived = arrived
        self._lost = lost
        self._timeout_s = timeout_s
        self._wake = wake
        self._sent = self._received = 0
        self._outbox: list[Message] = []
        self._pulse: Pulse | None = None
        self._closed = True
        self._failed = False

    @property
    def is_open(self) -> bool:
        return not self._closed

    @property
    def descriptor(self) -> int | None:
        """Readable when there may be something for `receive`; None while that has nothing to do."""
        return None if self._wake is None or self._pulse is None or self._closed else self._pump.descriptor

    async def open(self) -> Welcome | ClientWelcome:
        """Connect and join. Raises LinkLost: refused (with the reason), or no answer within timeout_s."""
        self._loop = asyncio.get_running_loop()
        self._welcome: asyncio.Future[Welcome | ClientWelcome] = self._loop.create_future()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        name = self._hello.worker if isinstance(self._hello, Hello) else self._hello.client
        socket.setsockopt(zmq.ROUTING_ID, f"{name}/{self.incarnation}".encode()[:255])
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, self._endpoint.server_public)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self._endpoint.client_public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self._endpoint.client_secret)
        limit(socket)
        watched = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        monitor = socket.get_monitor_socket(watched | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        socket.connect(self._endpoint.address)
        self._closed = False
        self._pump = Pump(socket, self._receive)
        self._monitor = Pump(monitor, self._disconnected)
        self.send(self._hello)
        try:
            return await asyncio.wait_for(self._welcome, self._timeout_s)
        except TimeoutError:
            raise LinkLost(f"{self._endpoint.address} did not answer within {self._timeout_s} s") from None
        finally:
            if not self._welcome.done() or self._welcome.cancelled() or self._welcome.exception():
                self.close()

    def send(self, *messages: Message) -> None:
        """Queue messages; on a closed link they go nowhere, as on one that is about to be lost."""
        if self._closed:
            return
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.extend(messages)

    def say(self, messages: Sequence[Message]) -> None:
        """Send messages at once, in one frame; before the Welcome they go nowhere either. From any thread, where one
        receives by itself: without `wake` the event loop must not be left asleep beside what has come."""
        if self._pulse is not None:
            self._put(messages)

    def receive(self) -> None:
        """Hand on what has come; see `wake`."""
        if self.descriptor is not None:
            self._pump.drain()

    def close(self) -> None:
        if self._closed:
            return
        with self._pump.lock:
            self._closed = True
            self._pump.close()
        if self._pulse is not None:
            self._pulse.stop()
        self._monitor.close()
        end(self._context)

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if messages:
            self._put(messages)

    def _put(self, messages: Sequence[Message]) -> None:
        with self._pump.lock:
            if self._closed or self._failed:
                return
            try:
                frames = encode_all(
                    messages, term=self._endpoint.term, incarnation=self.incarnation, sequence=self._sent + 1
                )
                self._sent += len(frames)
                for frame in frames:
                    self._pump.send([frame])
            except BadMessage as error:
                self._fail(LinkLost(f"a message that cannot be sent: {error}"))
            except zmq.Again:
                self._fail(LinkLost(f"{MAX_QUEUED_FRAMES} frames unread"))

    def _receive(self, parts: list[bytes]) -> None:
        if self._closed or self._failed:
            return
        try:
            head, body = decode_head(parts[-1])
            if head.term != self._endpoint.term or head.incarnation not in (self.incarnation, 0):
                return
            messages = decode_messages(body)
        except BadMessage as error:
            return self._fail(LinkLost(str(error)))
        if head.sequence == 0:
            first = messages[0] if messages else None
            reason = first.reason if isinstance(first, Refuse) else "a frame outside any link"
            return self._fail(LinkLost(reason, refused=not self._welcome.done()))
        if head.sequence != self._received + 1:
            return self._fail(LinkLost(f"frame {head.sequence} after {self._received}"))
        self._received += 1
        self.heard_s = self._loop.time()
        if not self._welcome.done():
            self._open(messages.pop(0))
        messages = [message for message in messages if not isinstance(message, Heartbeat)]
        if messages and not self._failed:
            self._arrived(messages)

    def _open(self, welcome: Message) -> None:
        if not isinstance(welcome, Welcome | ClientWelcome):
            return self._fail(LinkLost("the first message must be a Welcome"))
        self._pulse = Pulse(welcome.heartbeat_s, self._beat)
        self._welcome.set_result(welcome)
        if self._wake is not None:
            self._pump.lend(self._wake)

    def _fail(self, error: LinkLost) -> None:
        """Whatever else comes is not looked at. May be called on any thread."""
        self._failed = True
        self._loop.call_soon_threadsafe(self._lose, error)

    def _lose(self, error: LinkLost) -> None:
        if self._closed:
            return
        self.close()
        if self._welcome.done():
            self._lost(error)
        else:
            self._welcome.set_exception(error)

    def _beat(self, now: float, late_s: float) -> None:
        self.receive()
        with self._pump.lock:
            self.heard_s = heard_again(self.heard_s, now, late_s)
        if now - self.heard_s > self._timeout_s:
            self._lose(LinkLost(f"the coordinator was silent for {now - self.heard_s:.1f} s"))
        else:
            self.send(Heartbeat())

    def _disconnected(self, parts: list[bytes]) -> None:
        event = parse_monitor_message(parts)["event"]
        if event == zmq.EVENT_DISCONNECTED:
            # What it said last may still be queued here, and may say why.
            self.receive()
            self._loop.call_soon(self._lose, LinkLost("connection closed"))
        else:
            self._lose(LinkLost("the keys of this link are not the fleet's", refused=True))
