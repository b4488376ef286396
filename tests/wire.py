"""KV from worker to worker within one process: a transport that carries a ticket only when it is told to.

Tickets cross in runs of a few positions; each run lies in a buffer for a while, so whatever changes pages that
a ticket still reads, or reuses pages that it still writes, is seen in the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from torch import Tensor

from distspec.transfer.base import Computed, End, Incoming, Outgoing


class Port:
    """The transport of one life of a worker after the other. ended: tickets of it that are over on this side; computed:
    before which position those that it sends may be read; crossings: how far those got that arrive here."""

    def __init__(self, wire: Wire, end: End) -> None:
        self._wire = wire
        self._begin(end)

    def send(self, ticket: Outgoing) -> None:
        self.tickets[ticket.ticket] = ticket
        self.computed[ticket.ticket] = ticket.pieces[0].start

    def advance(self, ticket: int, stop: int, computed: Computed) -> None:
        computed()
        self.computed[ticket] = max(stop, self.computed[ticket])

    def receive(self, ticket: Incoming) -> None:
        self.tickets[ticket.ticket] = ticket

    def refuse(self, ticket: int, peer: End) -> None:
        self.ended.add(ticket)

    def close(self, ticket: int) -> bool:
        self.ended.add(ticket)
        return self.tickets.pop(ticket, None) is not None

    def finish(self, ticket: int, reason: str | None) -> None:
        entry = self.tickets.pop(ticket)
        self.ended.add(ticket)
        entry.done(reason)

    def reset(self, incarnation: int) -> None:
        self._wire.ports.pop(self.end, None)
        self._begin(End(self.end.worker, incarnation))

    def shutdown(self) -> None:
        self._wire.ports.pop(self.end, None)

    def _begin(self, end: End) -> None:
        self.end = end
        self.tickets: dict[int, Outgoing | Incoming] = {}
        self.ended: set[int] = set()
        self.computed: dict[int, int] = {}
        self.crossings: dict[int, Crossing] = {}
        self._wire.ports[end] = self


@dataclass
class Crossing:
    """How far a ticket got: `at` positions written, and the run that is on its way."""

    at: int = 0
    run: range | None = None
    buffer: Tensor | None = None


@dataclass
class Wire:
    """All ports. loss: how often a ticket that could move breaks instead."""

    random: Random
    loss: float = 0.0
    ports: dict[End, Port] = field(default_factory=dict)
    positions: int = 0

    def movable(self) -> list[tuple[Port, int]]:
        """(port, ticket) where `move` would change something."""
        return [
            (port, number)
            for port in self.ports.values()
            for number, ticket in port.tickets.items()
            if self._is_broken(ticket) or (isinstance(ticket, Incoming) and self._comes(port, ticket))
        ]

    def move(self, port: Port, number: int) -> None:
        """Carry a run of positions to its buffer, or from there to the pages, or end the ticket on this side."""
        ticket = port.tickets[number]
        if self._is_broken(ticket) or self.random.random() < self.loss:
            port.finish(number, "the link broke")
            return
        peer = self.ports[ticket.peer]
        source = peer.tickets[number] if isinstance(ticket, Incoming) else ticket
        assert isinstance(ticket, Incoming)
        assert isinstance(source, Outgoing)
        assert ticket.pieces == source.pieces, "both ends agree on what crosses"
        crossing = port.crossings.setdefault(number, Crossing(at=ticket.pieces[0].start))
        if crossing.run is not None and crossing.buffer is not None:
            ticket.write(crossing.run, crossing.buffer)
            self.positions += len(crossing.run)
            crossing.at, crossing.run = crossing.run.stop, None
        if crossing.at == ticket.pieces[-1].stop:
            port.finish(number, None)
            peer.finish(number, None)
            return
        if crossing.at == peer.computed[number]:
            return
        stop = min(crossing.at + self.random.randint(1, 24), peer.computed[number])
        crossing.run = range(crossing.at, stop)
        crossing.buffer = ticket.empty(crossing.run)
        crossing.buffer.copy_(source.read(crossing.run))

    def _comes(self, port: Port, ticket: Incoming) -> bool:
        """Its source has sent it, and something of it is computed that is not written here."""
        peer, number = self.ports[ticket.peer], ticket.ticket
        crossing = port.crossings.get(number)
        at = ticket.pieces[0].start if crossing is None else crossing.at
        return number in peer.tickets and (
            peer.computed[number] > at or peer.computed[number] == ticket.pieces[-1].stop
        )

    def _is_broken(self, ticket: Outgoing | Incoming) -> bool:
        peer = self.ports.get(ticket.peer)
        return peer is None or ticket.ticket in peer.ended
