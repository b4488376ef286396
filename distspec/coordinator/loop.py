"""The machine on its event loop: what arrives becomes an event, what it commands is sent.

The only part of the coordinator that touches sockets and time. It decides nothing but who may join: a peer of
the fleet's fingerprint, in the life that the fleet's supervisor gave it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

from distspec.coordinator import events
from distspec.coordinator.events import Command, Event
from distspec.coordinator.journal import Journal
from distspec.coordinator.machine import Machine
from distspec.coordinator.notes import Note
from distspec.coordinator.observe import Observer
from distspec.errors import HandshakeRefused, IllegalTransition, Unavailable
from distspec.protocol.channel import Hub, Peer
from distspec.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    ClientHello,
    ClientWelcome,
    Hello,
    Message,
    Output,
    Refuse,
    Submit,
    Welcome,
)

log = logging.getLogger(__name__)

THINK_S = 0.0005
"""How long what workers and clients say may wait at most, and a piece more, for what nobody waits for."""

REST = 3.0
"""How many times as long as it thought the loop rests: on a small machine workers want the processor, too."""


class Watcher(Protocol):
    """Whoever starts workers wants to know which of their lives came and went."""

    def joined(self, worker: str, incarnation: int) -> None: ...

    def left(self, worker: str, incarnation: int, reason: str) -> None: ...


class _Handled(NamedTuple):
    """See Observer.handled."""

    event: Event
    commands: Sequence[Command]
    notes: Sequence[Note]
    now_s: float
    took_s: float


class Loop:
    """Handler of a Hub. All methods belong to the hub's event loop.

    fingerprint: what is known beforehand of the fleet's; the first worker to join fills in the rest. failed: the
    machine broke on an event of its own, so its state cannot be trusted, and this coordinator life must end.
    """

    def __init__(
        self,
        machine: Machine,
        hub: Hub,
        watcher: Watcher,
        observer: Observer,
        *,
        heartbeat_s: float,
        fingerprint: dict[str, str],
        failed: Callable[[Exception], None],
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machine, self._hub, self._watcher, self._observer = machine, hub, watcher, observer
        self._heartbeat_s = heartbeat_s
        self._known = fingerprint
        self._fingerprint = dict(fingerprint)
        self._failed = failed
        self._journal = journal
        self._clock = clock
        self._lives: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._thinking: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to tell the machine the time."""
        self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._tick)

    def close(self) -> None:
        for timer in (self._timer, self._thinking):
            if timer is not None:
                timer.cancel()
        if self._journal is not None:
            self._journal.close()

    def expect(self, worker: str, incarnation: int) -> None:
        """From now on only this life of the worker may join."""
        self._lives[worker] = incarnation

    def drain(self, worker: str) -> None:
        """Move the work of a worker elsewhere and give it none."""
        self._handle(events.Drain(worker))

    # -- the hub's handler ---------------------------------------------------------------------

    def hello(self, peer: Peer, hello: Hello | ClientHello) -> Welcome | ClientWelcome | Refuse:
        if isinstance(hello, ClientHello):
            if hello.version != PROTOCOL_VERSION:
                return Refuse(reason=f"protocol version {hello.version}, fleet has {PROTOCOL_VERSION}")
            return ClientWelcome(term=self._hub.term, heartbeat_s=self._heartbeat_s)
        if not hello.incarnation == peer.incarnation == self._lives.get(hello.worker):
            return Refuse(reason=f"{hello.worker}: life {hello.incarnation} is not the one that was started")
        pairs = {key: (self._fingerprint.get(key, got), got) for key, got in hello.fingerprint.items()}
        differs = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        if differs:
            refused = HandshakeRefused(hello.worker, differs)
            log.error("%s", refused)
            return Refuse(reason=str(refused))
        return Welcome(term=self._hub.term, heartbeat_s=self._heartbeat_s)

    def joined(self, peer: Peer, hello: Hello | ClientHello) -> None:
        if isinstance(hello, Hello):
            log.info("%s joined on %s", hello.worker, hello.node or "this host")
            self._fingerprint = {**hello.fingerprint, **self._fingerprint}
            self._handle(events.WorkerJoined(hello))
            self._watcher.joined(peer.name, peer.incarnation)

    def arrived(self, peer: Peer, messages: list[Message]) -> None:
        if peer.is_client:
            self._handle(*(events.FromClient(peer.name, cast(Any, message)) for message in messages))
        else:
            self._handle(*(events.FromWorker(peer.name, peer.incarnation, cast(Any, message)) for message in messages))

    def left(self, peer: Peer, reason: str) -> None:
        if peer.is_client:
            self._handle(events.ClientLeft(peer.name))
            return
        log.warning("%s left: %s", peer.name, reason)
        self._handle(events.WorkerLeft(peer.name, peer.incarnation, reason))
        if all(other.is_client for other in self._hub.peers()):
            self._fingerprint = dict(self._known)
        self._watcher.left(peer.name, peer.incarnation, reason)

    # -- the machine -----------------------------------------------------------------------------

    def _tick(self) -> None:
        self.start()
        self._handle(events.Tick())
        if self._journal is not None:
            self._journal.flush()

    def _handle(self, *batch: Event) -> None:
        """Let the machine take events in order, and send what it commands. Workers wait for that, so what is seen of
        them comes afterwards."""
        handled = [self._take(event) for event in batch]
        self._hub.flush()
        for one in handled:
            self._observer.handled(*one)
        if self._thinking is None and self._machine.has_thoughts:
            self._thinking = asyncio.get_running_loop().call_later(REST * THINK_S, self._think)

    def _think(self) -> None:
        """For a moment, piece by piece; and again after a rest, until nothing is left to be worked out."""
        now_s, began_s = self._clock(), time.perf_counter()
        pieces, took_s, self._thinking = 0, 0.0, None
        try:
            while took_s < THINK_S and self._machine.has_thoughts:
                self._machine.handle(events.Thought(1), now_s)
                pieces, took_s = pieces + 1, time.perf_counter() - began_s
        except Exception as error:
            self._blame(events.Thought(pieces), error)
            return
        if self._journal is not None:
            self._journal.write(now_s, events.Thought(pieces), ())
        if self._machine.has_thoughts:
            self._thinking = asyncio.get_running_loop().call_later(REST * took_s, self._think)

    def _take(self, event: Event) -> _Handled:
        now_s, began_s = self._clock(), time.perf_counter()
        commands: list[Command] = []
        try:
            commands = self._machine.handle(event, now_s)
        except Exception as error:
            self._blame(event, error)
        finally:
            if self._journal is not None:
                self._journal.write(now_s, event, commands)
        for command in commands:
            self._do(command)
        return _Handled(event, commands, self._machine.notes, time.time(), time.perf_counter() - began_s)

    def _do(self, command: Command) -> None:
        if isinstance(command, events.Suspect):
            self._hub.reset(command.worker, command.reason)
        elif isinstance(command, events.ToWorker):
            self._hub.send(command.worker, command.message)
        else:
            self._hub.send(command.client, command.message)

    def _blame(self, event: Event, error: Exception) -> None:
        """One bad event must not end the fleet: whoever sent it loses its link or its request.

        An event that nobody sent can blame nobody: the next coordinator life starts from what clients and workers
        say, as after any death.
        """
        if not isinstance(error, IllegalTransition):
            log.error("the machine failed on %s", type(event).__name__, exc_info=error)
        if isinstance(event, events.FromWorker):
            self._hub.reset(event.worker, f"{type(event.message).__name__}: {error}")
        elif isinstance(event, events.FromClient) and isinstance(event.message, Submit):
            self._refuse(event.client, event.message)
        elif not isinstance(event, events.FromClient):
            self._failed(error)

    def _refuse(self, client: str, message: Submit) -> None:
        """End a request that could not be taken, with one terminal message, however far it had come."""
        if self._machine.knows(client, message.key):
            self._handle(events.FromClient(client, Cancel(key=message.key)))
            return
        refusal = Unavailable("the coordinator could not take this request")
        failure = (refusal.code, refusal.message, None)
        start = len(message.emitted)
        output = Output(key=message.key, start=start, tokens=(), finish_reason="error", error=failure)
        self._hub.send(client, output)
