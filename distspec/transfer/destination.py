"""The half of a lane that receives: it answers offers in the order of their numbers, and reads or receives them.

Knows the peer's board, where both halves meet. Does not know pages: they are written by the ticket.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
from torch import Tensor

from distspec.transfer.base import Incoming
from distspec.transfer.group import Group, Pending
from distspec.transfer.lane import DEEP, READ, REFUSED, Closed, Entry, Lane, Offer, runs
from distspec.transfer.meeting import Board, Missing
from distspec.transfer.window import Shown, Window

_SLICE_S = 0.2
"""How long to wait for an offer, or a ticket, before looking for the other."""
_IDLE_S = 0.5
"""Likewise, where a window is all that there is: memory of a peer that died is its until nobody has it open."""
_PULLED = 16
"""Pieces that are read from a window at a time: while they are, a ticket cannot be closed."""


class Destination(Lane):
    """_over: tickets that are over on one side, of which the other has not heard yet."""

    rank = 1

    def run(self) -> None:
        self._board: Board | None = None
        self._tickets: dict[int, Entry] = {}
        self._over: set[int] = set()
        while self._collect(block=not self._waits and not isinstance(self._present, Window)):
            try:
                self._serve()
            except Missing:
                continue
            except Exception as error:  # the peer's board is gone or silent; what it offers later is heard later
                self._board = None
                self._drop_link()
                self._over.clear()
                for entry in self._tickets.values():
                    self._fail(entry, error)
                self._tickets.clear()
        self._drop_link()

    @property
    def _waits(self) -> bool:
        """Something is to come from the peer."""
        return bool(self._tickets or self._over)

    def _collect(self, block: bool) -> bool:
        """Tickets that are new or were closed; False if the lane ends."""
        with suppress(queue.Empty):
            while (part := self._queue.get(block)) is not None:
                self._note(part.entry)
                block = False
            return False
        return True

    def _note(self, entry: Entry) -> None:
        if entry.number not in self._life.tickets:
            return  # it ended just before it was closed
        if not entry.open:
            self._forget(entry)
        elif entry.number in self._over:
            self._over.remove(entry.number)
            self._end(entry, f"{self._peer.worker} gave it up")
        else:
            self._tickets[entry.number] = entry

    def _forget(self, entry: Entry) -> None:
        """It is over here; the peer may offer it all the same."""
        self._life.tickets.pop(entry.number, None)
        self._tickets.pop(entry.number, None)
        self._over.add(entry.number)

    def _serve(self) -> None:
        """One offer. Raises Missing if there is none, TransferFailed if the peer's board is gone."""
        board = self._board = self._board or self._ways.visit(self._peer)
        key = f"{self._prefix}/{self._turn}"
        offer = msgspec.msgpack.decode(board.get(f"{key}/offer", _SLICE_S if self._waits else _IDLE_S), type=Offer)
        self._turn += 1
        if not offer.pieces:
            board.delete(f"{key}/")
            if offer.link:
                self._given_up(offer.ticket)
            return
        entry = self._awaited(offer.ticket)
        if entry is None or not entry.open:
            board.set(f"{key}/go", REFUSED)
        elif offer.shown is not None and self._present is not None and offer.link == self._number:
            self._read(board, key, entry, offer.pieces, offer.shown)
        else:
            self._come(board, key, entry, offer)

    def _come(self, board: Board, key: str, entry: Entry, offer: Offer) -> None:
        """Say by which link, and receive, unless that is a window: there the source offers it again."""
        number = offer.link
        if number <= self._number and (self._present is None or number != self._number):
            number = self._number + 1  # that link is broken on this side
        board.set(f"{key}/go", str(number).encode())
        try:
            link = self._link(number, board)
            if not isinstance(link, Window):
                self._receive(link, entry, offer.pieces)
        except Exception as error:  # whatever the backend raises, the ticket ends and the link with it
            self._drop_link()
            self._fail(entry, error)
            self._forget(entry)

    def _read(self, board: Board, key: str, entry: Entry, count: int, shown: Shown) -> None:
        """From the source's memory. What was read counts if that stands afterwards: else it may have been somebody
        else's, and the source will say that it gave the ticket up."""
        answer = REFUSED
        try:
            if self._pull(entry, count, shown):
                self._landed(entry, count)
                answer = READ
        except Closed:
            pass
        except Exception as error:  # likewise
            self._drop_link()
            self._fail(entry, error)
            self._forget(entry)
        board.set(f"{key}/go", answer)

    def _pull(self, entry: Entry, count: int, shown: Shown) -> bool:
        """Whether what was shown stood until it was read."""
        window, ticket = self._present, entry.ticket
        assert isinstance(window, Window)
        assert isinstance(ticket, Incoming)
        found = ticket.pieces[entry.at : entry.at + count]
        if shown.note is None:
            [positions] = found
            buffer = ticket.empty(positions)
            window.fetch(shown, buffer)
            if stood := window.stands(shown):
                entry.touch(partial(ticket.write, positions, buffer))
            return stood
        assert ticket.pull is not None
        addresses = window.addresses(shown)
        for first in range(0, count, _PULLED):
            some = found[first : first + _PULLED]
            positions = range(some[0].start, some[-1].stop)
            entry.touch(partial(ticket.pull, positions, addresses, shown.note, partial(window.look, shown)))
        return window.stands(shown)

    def _given_up(self, ticket: int) -> None:
        entry = self._tickets.pop(ticket, None)
        if entry is not None:
            self._end(entry, f"{self._peer.worker} gave it up")
        elif ticket in self._over:
            self._over.remove(ticket)
        else:
            self._over.add(ticket)  # this side will hear of it

    def _awaited(self, ticket: int) -> Entry | None:
        """An offered ticket, which this side may not have heard of yet."""
        deadline = time.monotonic() + self._ways.timeout_s
        while ticket not in self._tickets and ticket not in self._over and time.monotonic() < deadline:
            with suppress(queue.Empty):
                part = self._queue.get(timeout=_SLICE_S)
                if part is None:
                    self._queue.put(None)
                    break
                self._note(part.entry)
        return self._tickets.get(ticket)

    def _receive(self, group: Group, entry: Entry, count: int) -> None:
        ticket = entry.ticket
        assert isinstance(ticket, Incoming)
        under_way: deque[Callable[[], None]] = deque()
        for positions in runs(ticket.pieces[entry.at : entry.at + count]):
            buffer = ticket.empty(positions)
            under_way.append(partial(_land, entry, positions, buffer, group.receive(buffer)))
            if len(under_way) == DEEP:
                under_way.popleft()()
        for land in under_way:
            land()
        self._landed(entry, count)

    def _landed(self, entry: Entry, count: int) -> None:
        entry.at += count
        if entry.at == len(entry.ticket.pieces):  # closed or not, the peer says no more of it
            del self._tickets[entry.number]
            self._end(entry, None)
        elif not entry.open:
            self._forget(entry)


def _land(entry: Entry, positions: range, buffer: Tensor, received: Pending) -> None:
    """Into the pages; of a ticket that was closed, nowhere: the link is fine, and goes on."""
    received()
    assert isinstance(entry.ticket, Incoming)
    with suppress(Closed):
        entry.touch(partial(entry.ticket.write, positions, buffer))
