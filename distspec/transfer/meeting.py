"""Where the two ends of a ticket meet: a small key-value store that every worker serves.

Not `torch.distributed.TCPStore`, which looks up the name of whoever connects (a name server that does not answer
costs seconds), waits without end for a stopped process, and takes anyone's word. Here only holders of the secret
may connect, and every wait is bounded. Knows keys and bytes, no tensor and no torch.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from distspec.errors import TransferFailed

_ANSWER_S = 2.0
"""Beyond what was asked for, how long an answer of another process may take."""
_QUIET_S = 20
"""After so long TCP asks whether the other host is still there: one that lost its power closes no connection, and the
thread that serves it would wait for ever."""


class Place(Struct, frozen=True):
    """Where a worker's board is, and the secret that opens it. host is an address, not a name."""

    host: str
    port: int
    secret: bytes

    def __repr__(self) -> str:
        return f"Place({self.host}:{self.port})"


class Missing(Exception):
    """Nobody has set the key yet."""


class Board(Protocol):
    """Values by key. All methods raise TransferFailed when the board's worker is gone or does not answer."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value as soon as it is there. Raises Missing after timeout_s."""

    def delete(self, prefix: str) -> None:
        """Forget all keys that begin so."""


class _Ask(Struct, array_like=True):
    """value None and timeout_s None: delete. value None: get."""

    key: str
    value: bytes | None = None
    timeout_s: float | None = None


class Served:
    """The board of this worker, for itself and, at `place`, for its peers.

    strangers: connections that may be about to prove themselves at the same time; a further one is closed at once.
    """

    def __init__(self, host: str, strangers: int = 64) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._strangers = threading.BoundedSemaphore(strangers)
        self._listener = socket.create_server((host, 0), backlog=64)
        self.place = Place(host, int(self._listener.getsockname()[1]), secrets.token_bytes(32))
        threading.Thread(target=self._accept, name="transfer board", daemon=True).start()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise Missing(key)
            return self._values[key]

    def wait(self, key: str, timeout_s: float, unless: Callable[[], bool]) -> None:
        """Until the value is there, or `unless` holds, which is looked at again after a `nudge`; or for timeout_s."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or unless(), timeout_s)

    def nudge(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def delete(self, prefix: str) -> None:
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not self._strangers.acquire(blocking=False):
                peer.close()
                continue
            threading.Thread(target=self._serve, args=(peer,), name="transfer board", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with suppress(OSError, EOFError, AuthenticationError, msgspec.DecodeError):
            try:
                connection = _proven(peer, self.place.secret, first=True)
            finally:
                self._strangers.release()
            with connection:
                self._answer_all(connection)

    def _answer_all(self, connection: Connection[Any, Any]) -> None:
        while True:
            ask = msgspec.msgpack.decode(connection.recv_bytes(), type=_Ask)
            connection.send_bytes(self._answer(ask))

    def _answer(self, ask: _Ask) -> bytes:
        if ask.value is not None:
            self.set(ask.key, ask.value)
        elif ask.timeout_s is None:
            self.delete(ask.key)
        else:
            with suppress(Missing):
                return b"=" + self.get(ask.key, ask.timeout_s)
        return b""


class Visited:
    """The board of a peer, over one connection. For one thread, which may wait long; another's turn comes after that:
    a process group tells its store of an error on a thread of its own."""

    def __init__(self, place: Place) -> None:
        self._turn = threading.Lock()
        try:
            peer = socket.create_connection((place.host, place.port), _ANSWER_S)
            self._connection = _proven(peer, place.secret, first=False)
        except (OSError, EOFError, AuthenticationError) as error:
            raise TransferFailed(f"{place}: {error or 'it is gone, or not who it should be'}") from None

    def set(self, key: str, value: bytes) -> None:
        self._ask(_Ask(key, value))

    def get(self, key: str, timeout_s: float) -> bytes:
        answer = self._ask(_Ask(key, None, timeout_s), timeout_s)
        if not answer:
            raise Missing(key)
        return answer[1:]

    def delete(self, prefix: str) -> None:
        self._ask(_Ask(prefix))

    def close(self) -> None:
        self._connection.close()

    def _ask(self, ask: _Ask, timeout_s: float = 0.0) -> bytes:
        with self._turn:
            try:
                self._connection.send_bytes(msgspec.msgpack.encode(ask))
                if self._connection.poll(timeout_s + _ANSWER_S):
                    return self._connection.recv_bytes()
            except (OSError, EOFError) as error:
                raise TransferFailed(f"the peer is gone: {error or type(error).__name__}") from None
            self._connection.close()  # its answer may still come, to a question of later
            raise TransferFailed("the peer does not answer")


def _shut(peer: socket.socket) -> None:
    with suppress(OSError):  # it went by itself
        peer.shutdown(socket.SHUT_RDWR)


def _connection(peer: socket.socket) -> Connection[Any, Any]:
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, _QUIET_S), (socket.TCP_KEEPINTVL, _QUIET_S), (socket.TCP_KEEPCNT, 3)):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(peer.detach())


def _proven(peer: socket.socket, secret: bytes, first: bool) -> Connection[Any, Any]:
    """Over it both sides have proven to know the secret, without saying it (HMAC challenge of the standard library).
    Whoever does not in time is cut off, in whatever read or write it keeps us. first: this side asks first."""
    steps = [deliver_challenge, answer_challenge]
    cut = threading.Timer(_ANSWER_S, _shut, (peer,))
    with peer:
        connection = _connection(peer.dup())
        cut.start()
        try:
            for step in steps if first else reversed(steps):
                step(connection, secret)
        except BaseException:
            connection.close()
            raise
        finally:
            cut.cancel()
            cut.join()  # so that it knows no socket that is closed
    return connection
