"""KV from worker to worker over links of two, each made when first needed.

Each worker serves a small board. A pair is linked by a group of two, or a window, that meets at the source's board; no
global group exists, so pools may grow, shrink and lose members. Tickets cross in parts: as soon as pieces of one are
computed, the source offers them there. Offers of a pair and direction are numbered, so that tickets which wait for
their positions hold up no other. A link that failed is never used again: the two agree on the next number.

Through a window the destination reads what is offered where it lies in the source's pages, straight into its own; a
word in the source's memory says whether the ticket was open until then, and if not, what was read is nothing. The
source keeps the pages until it is told that they were read. To a group of gloo or NCCL the destination answers by which
link the offer may come; only then is anything received, since a posted receive holds its device and cannot be taken
back. What is sent goes to a buffer first, and what arrives from a buffer to the pages. Two runs of pieces are under way
at a time, so that a link does not wait for pages to be read and written.

Pages are touched only while the ticket is open here. So a ticket can be closed at once, whatever its link is still
doing, and a late write cannot land in reused pages. A gloo receive cannot be aborted: its thread ends with the timeout
at the latest, touching nothing.

Knows no Ray: where a peer's board is, it is told by `place_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from distspec.transfer.base import Computed, End, Incoming, Outgoing
from distspec.transfer.destination import Destination
from distspec.transfer.lane import Entry, Life, MakeLink, Part, Ways
from distspec.transfer.meeting import Place, Served
from distspec.transfer.source import Source

_JOIN_S = 1.0
_LET_GO_S = 15.0
"""A process that ends while one of its threads takes a link of NCCL down is aborted by the C++ runtime."""


class Collective:
    """The transport of one worker.

    host: this machine's address for its peers. place_of(end): the board of a peer's life; may block, and raises
    for a life that is over. timeout_s: silence after which a ticket fails.
    """

    def __init__(
        self,
        worker: str,
        host: str,
        make_link: MakeLink,
        place_of: Callable[[End], Place],
        *,
        timeout_s: float = 20.0,
    ) -> None:
        self._worker = worker
        self._ways = Ways(Served(host), place_of, make_link, timeout_s)
        self._life = Life(End(worker, 0))

    def send(self, ticket: Outgoing) -> None:
        self._open(Source, ticket)

    def advance(self, ticket: int, stop: int, computed: Computed) -> None:
        entry = self._life.tickets.get(ticket)
        if entry is not None and (pieces := entry.take(stop)):
            entry.lane.put(Part(entry, pieces, computed))

    def receive(self, ticket: Incoming) -> None:
        entry = self._open(Destination, ticket)
        entry.lane.put(Part(entry))

    def refuse(self, ticket: int, peer: End) -> None:
        entry = self._open(Destination, Incoming(ticket, peer, (), _unwanted, _unwanted, _unwanted))
        entry.close()  # before its lane hears of it, or that would take what is there already
        entry.lane.put(Part(entry))

    def close(self, ticket: int) -> bool:
        entry = self._life.tickets.get(ticket)
        if entry is None or not entry.close():
            return False
        entry.lane.put(Part(entry))  # so that the peer is told
        return True

    def reset(self, incarnation: int) -> None:
        life, self._life = self._life, Life(End(self._worker, incarnation))
        life.end()

    def shutdown(self) -> None:
        """Close everything; waits a moment for the threads, longer for those that let go of their links."""
        lanes = list(self._life.lanes.values())
        self.reset(0)
        self._ways.board.close()
        for lane in lanes:
            lane.join(_JOIN_S)
            if lane.is_letting_go:
                lane.join(_LET_GO_S)

    def _open(self, kind: type[Source] | type[Destination], ticket: Outgoing | Incoming) -> Entry:
        life = self._life
        lane = life.lanes.get((ticket.peer, kind))
        if lane is None:
            life.end_lanes_to_earlier_lives(ticket.peer)
            lane = life.lanes[ticket.peer, kind] = kind(life, ticket.peer, self._ways)
        entry = life.tickets[ticket.ticket] = Entry(ticket, lane)
        return entry

    @property
    def place(self) -> Place:
        """This worker's board: what its peers need."""
        return self._ways.board.place


def _unwanted(*_: object) -> NoReturn:
    raise AssertionError("a ticket that was refused brings nothing")
