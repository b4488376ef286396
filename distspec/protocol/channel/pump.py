"""A ZeroMQ socket and a heartbeat on an asyncio event loop, or beside it. Knows no peers and no messages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from itertools import count

import zmq

from distspec.protocol.codec import MAX_FRAME_BYTES

MAX_QUEUED_FRAMES = 10_000
_FRAMES_PER_TURN = 64
_END_S = 0.5


class Pump:
    """A ZeroMQ socket on the running event loop, without a task or future per message.

    Its descriptor signals edges, and any call on the socket may swallow one: so receiving goes on until
    nothing is there, and sending looks afterwards whether something has come in meanwhile.

    Frames may be sent by any thread. Once the pump is lent they are received by another one than the event loop's, and
    on_frame is called there. Whoever sends or receives holds `lock`, on_frame included.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_frame: Callable[[list[bytes]], None]) -> None:
        self.lock = threading.RLock()
        self.descriptor = int(socket.getsockopt(zmq.FD))
        self._socket = socket
        self._on_frame = on_frame
        self._loop = asyncio.get_running_loop()
        self._look: Callable[[], None] = self._schedule
        self._is_lent = self._scheduled = False
        self._loop.add_reader(self.descriptor, self._turn)
        self._schedule()

    def send(self, parts: list[bytes]) -> None:
        """Never waits. Raises zmq.Again for a full queue, zmq.ZMQError for a peer that is not there."""
        with self.lock:
            try:
                self._socket.send_multipart(parts, zmq.NOBLOCK)
            finally:
                if self._has_more():
                    self._look()

    def lend(self, wake: Callable[[], None]) -> None:
        """Let another thread receive, by `drain`: when the descriptor is readable, and when `wake` was called."""
        self._loop.remove_reader(self.descriptor)
        self._look, self._is_lent = wake, True
        wake()

    def drain(self, most: int | None = None) -> bool:
        """Receive the frames that are there, or the first so many; whether all were."""
        for _ in count() if most is None else range(most):
            with self.lock:
                if self._socket.closed or not self._has_more():
                    return True
                self._on_frame(self._socket.recv_multipart(zmq.NOBLOCK))
        return False

    def close(self, linger_ms: int = 0) -> None:
        with self.lock:
            if not self._socket.closed:
                self._loop.remove_reader(self.descriptor)
                self._socket.close(linger_ms)

    def _has_more(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _schedule(self) -> None:
        """To be called on the event loop, which whoever sends before the pump is lent does."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = is_done = False
        try:
            is_done = self._is_lent or self.drain(_FRAMES_PER_TURN)
        finally:  # a handler that breaks must not leave the frames behind it unread
            if not is_done:
                self._schedule()


class Pulse:
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


def heard_again(heard_s: float, now: float, late_s: float) -> float:
    """When a peer counts as heard by a process that was held up: what it said meanwhile may be still to be read, or was
    read just now."""
    return min(now, heard_s + late_s)


def limit(socket: zmq.Socket[bytes]) -> None:
    """Bounds on what a socket takes in and holds back."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_FRAMES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_FRAMES)


def end(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """End a context whose sockets are closed, waiting a moment for what they still send.

    libzmq 4.3.5 waits for ever where a connection was in the middle of its CURVE handshake when its answerer was
    closed. Its two threads then stay with the process; whoever closes a hub must not.
    """
    ender = threading.Thread(target=context.term, name="zmq end", daemon=True)
    ender.start()
    ender.join(_END_S)
