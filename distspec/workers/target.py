"""A target worker's work: a desk over an engine, and the KV and features that go to and come from other workers.

Knows which tickets are under way. Decides nothing: the desk knows requests, the transport knows links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch

from distspec.engine import Engine
from distspec.errors import TransferFailed
from distspec.kv.pool import Layout
from distspec.kv.sequence import Spots
from distspec.protocol.messages import (
    Draft,
    Drop,
    Extend,
    Fault,
    Lease,
    Message,
    ReceiveKV,
    Revoke,
    SendFeatures,
    SendKV,
    TransferLost,
    Withdraw,
)
from distspec.rounds.desk import Desk
from distspec.transfer.aside import Aside, hold
from distspec.transfer.base import Computed, End, Incoming, Lies, Outgoing, Transport, pieces
from distspec.workers.compute import Later


class _Where(msgspec.Struct, frozen=True):
    """Where positions from `start` on lie in the memory of a pool."""

    start: int
    spots: Spots
    layout: Layout


class TargetWork:
    """later: runs an action on the compute thread, from any thread."""

    def __init__(self, engine: Engine, desk: Desk, transport: Transport, later: Callable[[Later], None]) -> None:
        self._engine, self._desk, self._transport, self._later = engine, desk, transport, later
        self._aside = Aside(engine.device)
        self._tickets: dict[int, SendKV | SendFeatures | ReceiveKV] = {}
        self._growing: dict[int, tuple[SendKV, int]] = {}
        engine.launched = self._advance  # what waits for a prompt's last positions need not wait for its outcome

    def receive(self, message: Message) -> Sequence[Message]:
        if isinstance(message, SendKV | SendFeatures):
            return self._send(message)
        if isinstance(message, ReceiveKV):
            return self._receive(message)
        if isinstance(message, Drop):
            replies = self._desk.receive(message)
            self._close(message.request)
            return replies
        if isinstance(message, Extend | Lease | Withdraw | Revoke | Draft):
            return self._desk.receive(message)
        return [Fault(reason=f"{type(message).__name__} is nothing for a target worker")]

    def ready(self) -> bool:
        return self._desk.ready()

    def hold_s(self) -> float:
        return self._desk.hold_s()

    def compiled(self) -> Sequence[Message]:
        """A grammar has become ready, or will never be."""
        return self._desk.compiled()

    def step(self) -> Sequence[Message]:
        replies = self._desk.step()
        self._advance()
        return replies

    def reset(self, incarnation: int) -> None:
        self._transport.reset(incarnation)
        self._close()
        self._desk.reset()
        self._desk.check()

    def check(self) -> None:
        """Page conservation. Raises AssertionError."""
        self._desk.check()

    # -- tickets -----------------------------------------------------------------------------

    def _send(self, message: SendKV | SendFeatures) -> Sequence[Message]:
        try:
            read, lies = self._readers(message)
        except TransferFailed as error:
            return [_lost(message, str(error))]
        ticket = Outgoing(
            message.ticket,
            End(message.peer, message.peer_incarnation),
            self._pieces(message),
            partial(self._read, read),
            lambda reason: self._later(partial(self._sent, message)),
            lies,
        )
        self._tickets[message.ticket] = message
        self._transport.send(ticket)
        if isinstance(message, SendKV):
            self._growing[message.ticket] = message, message.start
            self._advance()
        else:
            self._transport.advance(message.ticket, message.start + message.length, self._aside.mark())
        return []

    def _readers(
        self, message: SendKV | SendFeatures
    ) -> tuple[Callable[[range], torch.Tensor], Callable[[range], Lies] | None]:
        """See Outgoing. Raises TransferFailed."""
        if isinstance(message, SendFeatures):
            return self._desk.tickets.features_of(message), None
        slot = self._desk.tickets.source(message, partial(self._cut, message))
        return lambda positions: self._engine.gather(slot, positions.start, len(positions)), partial(self._lies, slot)

    def _read(self, read: Callable[[range], torch.Tensor], positions: range) -> torch.Tensor:
        with self._aside():
            return read(positions)

    def _lies(self, slot: int, positions: range) -> Lies:
        pool, sequence = self._engine.pool, self._engine.sequence(slot)
        where = _Where(positions.start, sequence.spots(positions.start, len(positions)), pool.layout)
        return Lies(pool.memory, msgspec.msgpack.encode(where))

    def _advance(self) -> None:
        """Let tickets cross as far as their positions are computed by now."""
        for ticket, (message, before) in list(self._growing.items()):
            stop = self._desk.tickets.computed(message)
            if stop > before:
                self._growing[ticket] = message, stop
                self._transport.advance(ticket, stop, self._aside.mark())
            if stop == message.start + message.length:
                del self._growing[ticket]

    def _cut(self, message: SendKV) -> None:
        """Its request is let go before all that it sends is computed."""
        self._growing.pop(message.ticket, None)
        self._tickets.pop(message.ticket, None)
        self._transport.close(message.ticket)

    def _receive(self, message: ReceiveKV) -> Sequence[Message]:
        slot, peer = self._desk.tickets.reserve(message), End(message.peer, message.peer_incarnation)
        if not isinstance(slot, int):
            self._transport.refuse(message.ticket, peer)
            return [slot]
        computed = self._aside.mark()
        ticket = Incoming(
            message.ticket,
            peer,
            self._pieces(message),
            partial(self._empty, computed),
            partial(self._write, slot),
            lambda reason: self._later(partial(self._received, message, reason)),
            partial(self._pull, computed, slot),
        )
        self._tickets[message.ticket] = message
        self._transport.receive(ticket)
        return []

    def _write(self, slot: int, positions: range, content: torch.Tensor) -> None:
        with self._aside():
            self._engine.scatter(slot, positions.start, content)

    def _pull(
        self,
        computed: Computed,
        slot: int,
        positions: range,
        addresses: Sequence[int],
        note: bytes,
    ) -> None:
        """computed: see _empty. Raises TransferFailed if the source keeps something else of a position."""
        where, pool = msgspec.msgpack.decode(note, type=_Where), self._engine.pool
        if not where.layout.fits(pool.layout):
            raise TransferFailed(f"pools differ: {where.layout} there, {pool.layout} here")
        spots = self._engine.sequence(slot).spots(positions.start, len(positions))
        theirs = where.spots.behind(positions.start - where.start)
        hold(computed)
        pool.pull(spots, addresses, where.layout, theirs, len(positions))

    def _sent(self, message: SendKV | SendFeatures) -> Sequence[Message]:
        # What became of it, the receiver says.
        self._growing.pop(message.ticket, None)
        if self._tickets.pop(message.ticket, None) is message:
            self._desk.tickets.sent(message.request, message.ticket)
        return []

    def _received(self, message: ReceiveKV, reason: str | None) -> Sequence[Message]:
        if self._tickets.pop(message.ticket, None) is not message:
            return []
        return [self._desk.tickets.received(message) if reason is None else self._desk.tickets.lost(message, reason)]

    def _close(self, request: int | None = None) -> None:
        """End the tickets of a request, or all; the desk says Freed when its last one is over."""
        for message in [m for m in self._tickets.values() if request in (None, m.request)]:
            del self._tickets[message.ticket]
            self._growing.pop(message.ticket, None)
            self._transport.close(message.ticket)
            if isinstance(message, SendKV | SendFeatures):
                self._desk.tickets.sent(message.request, message.ticket)
            else:
                self._desk.tickets.lost(message, "dropped")

    def _pieces(self, message: SendKV | SendFeatures | ReceiveKV) -> tuple[range, ...]:
        pool = self._engine.pool
        width = pool.features.shape[1] if isinstance(message, SendFeatures) else pool.width
        return pieces(message.start, message.length, width * self._engine.model.dtype.itemsize)

    def _empty(self, computed: Computed, positions: range) -> torch.Tensor:
        """computed: what was launched for whoever had the pages before, so that it is not written over what comes."""
        computed()
        size = len(positions) * self._engine.pool.width
        with self._aside():  # memory that the computing stream has done with
            return torch.empty(size, dtype=self._engine.model.dtype, device=self._engine.device)


def _lost(message: SendKV | SendFeatures, reason: str) -> TransferLost:
    return TransferLost(request=message.request, epoch=message.epoch, ticket=message.ticket, reason=reason)
