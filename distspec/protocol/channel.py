"""The channel: a Hub in the coordinator, a Link in every worker and client, frames over ZeroMQ between them.

Knows peers, terms, incarnations, sequence numbers and heartbeats. Does not know what a message asks for.

One Link is one life of a peer (an incarnation) in one life of the coordinator (a term). It never mends itself:
a lost or repeated frame, silence beyond the timeout, a closed connection or a full queue ends it on both sides,
and the peer comes back as a new incarnation, so that both sides agree on what was forgotten. Frames of another
term or incarnation are dropped here and nowhere else. Silence is told by heartbeats alone, since neither a
stopped process nor a cut cable closes a connection. A ROUTER drops what it cannot route unless routing is
mandatory, so it is, and an unroutable frame ends the link.

All messages queued in one turn of the event loop leave in one frame per peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message
from zmq.utils.z85 import encode as z85encode

from distspec.errors import BadMessage, LinkLost
from distspec.protocol.codec import decode_head, decode_messages, encode
from distspec.protocol.keys import Endpoint, FleetKeys
from distspec.protocol.messages import ClientHello, ClientWelcome, Heartbeat, Hello, Message, Refuse, Welcome

MAX_FRAME_BYTES = 64 * 2**20
MAX_QUEUED_FRAMES = 10_000
_DOMAIN = "fleet"
_FRAMES_PER_TURN = 64
_PROBE_DELAY_S = 0.02
"""From a closed connection to the moment its route is surely gone, so that a probe finds it unroutable."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One life of a worker or client, as its Hello named it."""

    name: str
    incarnation: int
    is_client: bool


class HubHandler(Protocol):
    """What the owner of a Hub is told, in order, on its event loop."""

    def hello(self, peer: Peer, hello: Hello | ClientHello) -> Welcome | ClientWelcome | Refuse:
        """Whether this peer may join."""

    def joined(self, peer: Peer, hello: Hello | ClientHello) -> None: ...

    def arrived(self, peer: Peer, messages: list[Message]) -> None:
        """The messages of one frame, heartbeats taken out; only between joined and left."""

    def left(self, peer: Peer, reason: str) -> None: ...


class _Pump:
    """A ZeroMQ socket on the running event loop, without a task or future per message.

    Its descriptor signals edges, and any call on the socket may swallow one: so receiving goes on until
    nothing is there, and sending looks afterwards whether something has come in meanwhile.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_frame: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_frame = on_frame
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._scheduled = False
        self._loop.add_reader(self._descriptor, self._drain)
        self._schedule()

    def send(self, parts: list[bytes]) -> None:
        """Never waits. Raises zmq.Again for a full queue, zmq.ZMQError for a peer that is not there."""
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        finally:
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._schedule()

    def close(self, linger_ms: int = 0) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger_ms)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        for _ in range(_FRAMES_PER_TURN):
            if self._socket.closed:
                return
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_frame(parts)
            except BaseException:
                self._schedule()  # a handler that breaks must not leave the frames behind it unread
                raise
        self._schedule()


class _Pulse:
    """Calls beat(now, late_s) every period_s. late_s: how long this process itself was held up."""

    def __init__(self, period_s: float, beat: Callable[[float, float], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._period_s = period_s
        self._beat = beat
        self._due = self._loop.time() + period_s
        self._timer = self._loop.call_at(self._due, self._fire)

    def stop(self) -> None:
        self._timer.cancel()

    def _fire(self) -> None:
        now = self._loop.time()
        late_s = now - self._due
        self._due = now + self._period_s
        self._timer = self._loop.call_at(self._due, self._fire)
        self._beat(now, late_s if late_s > self._period_s else 0.0)


@dataclass(slots=True)
class _Session:
    peer: Peer
    identity: bytes
    heard_s: float
    sent: int = 0
    received: int = 1
    outbox: list[Message] = field(default_factory=list)


class Hub:
    """The coordinator's end of all links.

    Sends nothing before `start`; all methods belong to the event loop that called it.
    """

    def __init__(self, keys: FleetKeys, term: int, *, heartbeat_s: float, timeout_s: float) -> None:
        self.term = term
        self._keys = keys
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._sessions: dict[str, _Session] = {}
        self._by_identity: dict[bytes, _Session] = {}
        self._flushing = False
        self.stale_frames = 0

    def start(self, handler: HubHandler, host: str = "127.0.0.1") -> Endpoint:
        """Listen on a free port of `host`, an address of this machine that the peers can reach."""
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        guard = self._context.socket(zmq.REP)
        guard.bind("inproc://zeromq.zap.01")  # the name that libzmq asks for every connection (RFC 27, ZAP)
        self._guard = _Pump(guard, self._admit)
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self._keys.server_secret)
        _limit(socket)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        port = socket.bind_to_random_port(f"tcp://{host}")
        self._pump = _Pump(socket, self._receive)
        self._monitor = _Pump(monitor, self._disconnected)
        self._pulse = _Pulse(self._heartbeat_s, self._beat)
        return self._keys.endpoint(f"tcp://{host}:{port}", self.term)

    def close(self) -> None:
        """End all links, telling the peers. The handler hears nothing more."""
        for session in list(self._sessions.values()):
            self._refuse(session.identity, session.peer.incarnation, "the coordinator closed")
        self._sessions.clear()
        self._by_identity.clear()
        self._pulse.stop()
        self._monitor.close()
        self._pump.close(linger_ms=100)
        self._guard.close()
        self._context.term()

    def peers(self) -> list[Peer]:
        return [session.peer for session in self._sessions.values()]

    def send(self, name: str, message: Message) -> bool:
        """Queue a message; False if no such peer is joined (its `left` was or will be told)."""
        session = self._sessions.get(name)
        if session is None:
            return False
        session.outbox.append(message)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        return True

    def reset(self, name: str, reason: str) -> None:
        """End a peer's link; `left` is told in a later turn of the event loop."""
        session = self._sessions.get(name)
        if session is not None:
            self._loop.call_soon(self._lose, session, reason)

    def _admit(self, request: list[bytes]) -> None:
        """Answer libzmq's question whether a connection with this key may be."""
        version, number, _, _, _, mechanism, key = [*request, *[b""] * 7][:7]
        good = mechanism == b"CURVE" and z85encode(key) == self._keys.client_public.encode()
        self._guard.send([version, number, *((b"200", b"OK") if good else (b"400", b"unknown key")), b"", b""])

    def _flush(self) -> None:
        self._flushing = False
        for session in list(self._sessions.values()):
            if session.outbox:
                self._send_now(session)

    def _send_now(self, session: _Session) -> None:
        messages, session.outbox = session.outbox, []
        session.sent += 1
        frame = encode(messages, term=self.term, incarnation=session.peer.incarnation, sequence=session.sent)
        try:
            self._pump.send([session.identity, frame])
        except zmq.Again:
            self._lose(session, f"{MAX_QUEUED_FRAMES} frames unread")
        except zmq.ZMQError:
            self._lose(session, "connection closed")

    def _receive(self, parts: list[bytes]) -> None:
        if len(parts) != 2:
            return
        identity, data = parts
        session = self._by_identity.get(identity)
        try:
            head, body = decode_head(data)
            if head.term != self.term or (session and head.incarnation != session.peer.incarnation):
                self.stale_frames += 1
                if session is None:
                    self._refuse(identity, head.incarnation, f"term {head.term} is not {self.term}", term=head.term)
                return
            if session is None:
                if head.sequence != 1:
                    return self._refuse(identity, head.incarnation, "no such link")
                return self._hello(identity, head.incarnation, decode_messages(body))
            if head.sequence != session.received + 1:
                return self._lose(session, f"frame {head.sequence} after {session.received}")
            messages = decode_messages(body)
        except BadMessage as error:
            if session is not None:
                return self._lose(session, str(error))
            return self._refuse(identity, 0, str(error))
        session.received += 1
        session.heard_s = self._loop.time()
        messages = [message for message in messages if not isinstance(message, Heartbeat)]
        if messages:
            self._handler.arrived(session.peer, messages)

    def _hello(self, identity: bytes, incarnation: int, messages: list[Message]) -> None:
        first = messages[0] if messages else None
        if isinstance(first, Hello):
            peer = Peer(first.worker, incarnation, False)
        elif isinstance(first, ClientHello):
            peer = Peer(first.client, incarnation, True)
        else:
            return self._refuse(identity, incarnation, "the first message must be a Hello")
        held = self._sessions.get(peer.name)
        if held is not None and (held.peer.is_client != peer.is_client or held.peer.incarnation >= incarnation):
            return self._refuse(identity, incarnation, f"{peer.name} is here as incarnation {held.peer.incarnation}")
        answer = self._handler.hello(peer, first)
        if isinstance(answer, Refuse):
            return self._refuse(identity, incarnation, answer.reason)
        if held is not None:
            self._lose(held, "replaced by a newer incarnation")
        session = _Session(peer, identity, self._loop.time())
        self._sessions[peer.name] = self._by_identity[identity] = session
        self.send(peer.name, answer)
        self._handler.joined(peer, first)
        if len(messages) > 1:
            self._handler.arrived(peer, messages[1:])

    def _lose(self, session: _Session, reason: str) -> None:
        if self._sessions.get(session.peer.name) is not session:
            return
        del self._sessions[session.peer.name]
        del self._by_identity[session.identity]
        self._refuse(session.identity, session.peer.incarnation, reason)
        self._handler.left(session.peer, reason)

    def _refuse(self, identity: bytes, incarnation: int, reason: str, term: int | None = None) -> None:
        frame = encode(
            [Refuse(reason=reason)], term=self.term if term is None else term, incarnation=incarnation, sequence=0
        )
        with suppress(zmq.ZMQError):  # it is gone, or reads nothing: its own timeout will tell it
            self._pump.send([identity, frame])

    def _beat(self, now: float, late_s: float) -> None:
        for session in list(self._sessions.values()):
            session.heard_s += late_s  # what they said while this process slept is still to be read
            if now - session.heard_s > self._timeout_s:
                self._lose(session, f"silent for {now - session.heard_s:.1f} s")
            else:
                self._probe(session)

    def _probe(self, session: _Session) -> None:
        session.outbox.append(Heartbeat())
        self._send_now(session)

    def _disconnected(self, _: list[bytes]) -> None:
        # The event does not say which peer it was: a frame to each finds the one that has no route.
        self._loop.call_later(_PROBE_DELAY_S, self._probe_all)

    def _probe_all(self) -> None:
        for session in list(self._sessions.values()):
            self._probe(session)


class Link:
    """One life of a worker or client in a fleet.

    arrived: the messages of a frame, heartbeats taken out. lost: told once, and never after `close`. Both are
    called on the event loop that called `open`; they may be called before `open` returns to its caller.
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
    ) -> None:
        self.incarnation = incarnation
        self.heard_s = 0.0
        """Event loop time of the coordinator's last frame."""
        self._endpoint = endpoint
        self._hello = hello
        self._arrived = arrived
        self._lost = lost
        self._timeout_s = timeout_s
        self._sent = self._received = 0
        self._outbox: list[Message] = []
        self._pulse: _Pulse | None = None
        self._closed = True

    @property
    def is_open(self) -> bool:
        return not self._closed

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
        _limit(socket)
        watched = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        monitor = socket.get_monitor_socket(watched | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        socket.connect(self._endpoint.address)
        self._closed = False
        self._pump = _Pump(socket, self._receive)
        self._monitor = _Pump(monitor, self._disconnected)
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

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._pulse is not None:
            self._pulse.stop()
        self._monitor.close()
        self._pump.close()
        self._context.term()

    def _flush(self) -> None:
        messages, self._outbox = self._outbox, []
        if self._closed or not messages:
            return
        self._sent += 1
        frame = encode(messages, term=self._endpoint.term, incarnation=self.incarnation, sequence=self._sent)
        try:
            self._pump.send([frame])
        except zmq.Again:
            self._lose(LinkLost(f"{MAX_QUEUED_FRAMES} frames unread"))

    def _receive(self, parts: list[bytes]) -> None:
        if self._closed:
            return
        try:
            head, body = decode_head(parts[-1])
            if head.term != self._endpoint.term or head.incarnation not in (self.incarnation, 0):
                return
            messages = decode_messages(body)
        except BadMessage as error:
            return self._lose(LinkLost(str(error)))
        if head.sequence == 0:
            first = messages[0] if messages else None
            reason = first.reason if isinstance(first, Refuse) else "a frame outside any link"
            return self._lose(LinkLost(reason, refused=not self._welcome.done()))
        if head.sequence != self._received + 1:
            return self._lose(LinkLost(f"frame {head.sequence} after {self._received}"))
        self._received += 1
        self.heard_s = self._loop.time()
        if not self._welcome.done():
            self._open(messages.pop(0))
        messages = [message for message in messages if not isinstance(message, Heartbeat)]
        if messages and not self._closed:
            self._arrived(messages)

    def _open(self, welcome: Message) -> None:
        if not isinstance(welcome, Welcome | ClientWelcome):
            return self._lose(LinkLost("the first message must be a Welcome"))
        self._pulse = _Pulse(welcome.heartbeat_s, self._beat)
        self._welcome.set_result(welcome)

    def _lose(self, error: LinkLost) -> None:
        if self._closed:
            return
        # Closing here would free the socket that is being drained: the pump looks before each receive.
        self.close()
        if self._welcome.done():
            self._lost(error)
        else:
            self._welcome.set_exception(error)

    def _beat(self, now: float, late_s: float) -> None:
        self.heard_s += late_s
        if now - self.heard_s > self._timeout_s:
            self._lose(LinkLost(f"the coordinator was silent for {now - self.heard_s:.1f} s"))
        else:
            self.send(Heartbeat())

    def _disconnected(self, parts: list[bytes]) -> None:
        event = parse_monitor_message(parts)["event"]
        if event == zmq.EVENT_DISCONNECTED:
            # What it said last may still be queued here, and may say why.
            self._loop.call_soon(self._lose, LinkLost("connection closed"))
        else:
            self._lose(LinkLost("the keys of this link are not the fleet's", refused=True))


def _limit(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)
