"""The coordinator's end of all links."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import zmq
from zmq.utils.z85 import encode as z85encode

from distspec.errors import BadMessage
from distspec.protocol.channel.pump import MAX_QUEUED_FRAMES, Pulse, Pump, end, heard_again, limit
from distspec.protocol.codec import decode_head, decode_messages, encode, encode_all
from distspec.protocol.keys import Endpoint, FleetKeys
from distspec.protocol.messages import (
    ClientHello,
    ClientWelcome,
    Heartbeat,
    Hello,
    Message,
    Refuse,
    Welcome,
)

_DOMAIN = "fleet"
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


@dataclass(slots=True)
class _Session:
    peer: Peer
    identity: bytes
    heard_s: float
    sent: int = 0
    received: int = 1
    failed: bool = False
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

    def start(self, handler: HubHandler, host: str = "127.0.0.1") -> Endpoint:
        """Listen on a free port of `host`, an address of this machine that the peers can reach."""
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        guard = self._context.socket(zmq.REP)
        guard.bind("inproc://zeromq.zap.01")  # the name that libzmq asks for every connection (RFC 27, ZAP)
        self._guard = Pump(guard, self._admit)
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self._keys.server_secret)
        limit(socket)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        port = socket.bind_to_random_port(f"tcp://{host}")
        self._pump = Pump(socket, self._receive)
        self._monitor = Pump(monitor, self._disconnected)
        self._pulse = Pulse(self._heartbeat_s, self._beat)
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
        end(self._context)

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
            self._loop.call_soon(self.flush)
        return True

    def flush(self) -> None:
        """Send what is queued at once, and not only in the next turn of the event loop. Of a link that ends so the
        handler is told in a later turn, since it may be in the middle of an event."""
        self._flushing = False
        for session in list(self._sessions.values()):
            if session.outbox:
                self._send_now(session)

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

    def _send_now(self, session: _Session) -> None:
        messages, session.outbox = session.outbox, []
        if session.failed:
            return
        try:
            frames = encode_all(
                messages, term=self.term, incarnation=session.peer.incarnation, sequence=session.sent + 1
            )
            session.sent += len(frames)
            for frame in frames:
                self._pump.send([session.identity, frame])
        except BadMessage as error:
            self._fail(session, f"a message that cannot be sent: {error}")
        except zmq.Again:
            self._fail(session, f"{MAX_QUEUED_FRAMES} frames unread")
        except zmq.ZMQError:
            self._fail(session, "connection closed")

    def _fail(self, session: _Session, reason: str) -> None:
        """What comes after a message that was not sent is not sent either."""
        session.failed = True
        self._loop.call_soon(self._lose, session, reason)

    def _receive(self, parts: list[bytes]) -> None:
        if len(parts) != 2:
            return
        identity, data = parts
        session = self._by_identity.get(identity)
        try:
            head, body = decode_head(data)
            if head.term != self.term or (session and head.incarnation != session.peer.incarnation):
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
            session.heard_s = heard_again(session.heard_s, now, late_s)
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
