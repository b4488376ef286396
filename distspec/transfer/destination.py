"""The half of a lane that receives: it takes offers in the order of their numbers, and reads or receives them.

What is shown through a window is read by a device, which may have to wait until it is computed; meanwhile the next
offers are taken, so that their reading follows at once. All else ends before another offer is looked at.

Knows the peer's board, where both halves meet. Does not know pages: they are written by the ticket.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec
from torch import Tensor

from distspec.transfer.base import Incoming
from distspec.transfer.group import Group, Pending
from distspec.transfer.lane import AGAIN, DEEP, READ, REFUSED, Closed, Entry, Lane, Offer, runs
from distspec.transfer.meeting import Board, Missing
from distspec.transfer.window import Reading, Shown, Window

_SLICE_S = 0.2
"""How long to wait for an offer, or a ticket, before looking for the other."""
_IDLE_S = 0.5
"""Likewise, where a window is all that there is: memory of a peer that died is its until nobody has it open."""


@dataclass(frozen=True, slots=True)
class _Read:
    """So many pieces that are being read, and where the answer is waited for."""

    key: str
    entry: Entry
    pieces: int
    reading: Reading


class Destination(Lane):
    """_over: tickets that are over on one side, of which the other has not heard yet."""

    rank = 1

    def run(self) -> None:
        self._board: Board | None = None
        self._tickets: dict[int, Entry] = {}
        self._over: set[int] = set()
        self._under_way: deque[_Read] = deque()
        while self._collect(block=not self._waits and not isinstance(self._present, Window)):
            try:
                self._serve()
            except Missing:
                continue
            except Exception as error:  # the peer's board is gone or silent; what it offers later is heard later
                self._board = None
                self._drop_link()
                self._under_way.clear()
                self._over.clear()
                for entry in self._tickets.values():
                    self._fail(entry, error)
                self._tickets.clear()
        self._drop_link()

    @property
    def _waits(self) -> bool:
        """Something is to come from the peer."""
        return bool(self._tickets or self._over or self._under_way)

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
        """One offer, or the end of a reading. Raises Missing if there is neither, TransferFailed if the peer's board is
        gone."""
        board = self._board = self._board or self._ways.visit(self._peer)
        if self._under_way and self._under_way[0].reading.is_done():
            self._finish(board)
            return
        key = f"{self._prefix}/{self._turn}"
        try:
            offer = msgspec.msgpack.decode(board.get(f"{key}/offer", self._patience_s), type=Offer)
        except Missing:
            if not self._under_way:
                raise
            self._finish(board)
            return
        self._turn += 1
        self._take(board, key, offer)

    @property
    def _patience_s(self) -> float:
        """How long to wait for an offer."""
        if self._under_way:
            return 0.0
        return _SLICE_S if self._waits else _IDLE_S

    def _take(self, board: Board, key: str, offer: Offer) -> None:
        window, shown, entry = self._present, offer.shown, self._tickets.get(offer.ticket)
        sees = isinstance(window, Window) and offer.link == self._number
        if entry is not None and entry.open and offer.pieces and sees and shown is not None and shown.note is not None:
            self._begin(board, key, entry, offer, shown)
            return
        while self._under_way:
            self._finish(board)
        if not offer.pieces:
            board.delete(f"{key}/")
            if offer.link:
                self._given_up(offer.ticket)
            return
        entry = self._awaited(offer.ticket)
        if entry is None or not entry.open:
            board.set(f"{key}/go", REFUSED)
        elif shown is None or self._present is None or offer.link != self._number:
            self._come(board, key, entry, offer)
        elif shown.note is None:
            self._fetch(board, key, entry, offer, shown)
        else:
            self._begin(board, key, entry, offer, shown)

    def _come(self, board: Board, key: str, entry: Entry, offer: Offer) -> None:
        """Say by which link, and receive, unless that is a window: there the source offers it again."""
        number = offer.link
        if isinstance(self._present, Window) and number < self._number:
            number = self._number  # it was offered before the source came to this one
        elif number <= self._number and (self._present is None or number != self._number):
            number = self._number + 1  # that link is broken on this side
        board.set(f"{key}/go", str(number).encode())
        try:
            link = self._link(number, board)
            if not isinstance(link, Window):
                self._receive(link, entry, _pieces(entry, offer))
        except Exception as error:
            self._break(entry, error)

    def _begin(self, board: Board, key: str, entry: Entry, offer: Offer, shown: Shown) -> None:
        """Launch what reads the source's memory."""
        window, ticket = self._present, entry.ticket
        assert isinstance(window, Window)
        assert isinstance(ticket, Incoming)
        assert ticket.pull is not None
        assert shown.note is not None
        try:
            pieces = _pieces(entry, offer)
            positions = range(pieces[0].start, pieces[-1].stop)
            read = partial(ticket.pull, positions, window.addresses(shown), shown.note)
            reading = window.read(shown)
            try:
                entry.lend(partial(reading.launch, read), reading.stop)
            except BaseException:
                reading.stop()
                raise
        except Exception as error:
            self._break(entry, error)
            board.set(f"{key}/go", REFUSED)
        else:
            self._under_way.append(_Read(key, entry, len(pieces), reading))

    def _finish(self, board: Board) -> None:
        """The first reading that is under way. It counts if what was shown stands afterwards: else it may have been
        somebody else's, and the source will say that it gave the ticket up; or it came too early."""
        read = self._under_way.popleft()
        answer = REFUSED
        try:
            stood = read.reading.stands()
            read.entry.back(read.reading.stop)
            if stood:
                self._landed(read.entry, read.pieces)
                answer = READ
            elif read.reading.is_early():
                answer = AGAIN
        except Exception as error:
            self._break(read.entry, error)
        board.set(f"{read.key}/go", answer)

    def _fetch(self, board: Board, key: str, entry: Entry, offer: Offer, shown: Shown) -> None:
        """A stage."""
        window, ticket = self._present, entry.ticket
        assert isinstance(window, Window)
        assert isinstance(ticket, Incoming)
        answer = REFUSED
        try:
            [positions] = _pieces(entry, offer)
            buffer = ticket.empty(positions)
            if window.fetch(shown, buffer):
                entry.touch(partial(ticket.write, positions, buffer))
                self._landed(entry, 1)
                answer = READ
        except Exception as error:
            self._break(entry, error)
        board.set(f"{key}/go", answer)

    def _break(self, entry: Entry, error: Exception) -> None:
        """Whatever the backend raises, the ticket ends and the link with it; not if it was closed."""
        if isinstance(error, Closed):
            return
        self._drop_link()
        self._fail(entry, error)
        self._forget(entry)

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

    def _receive(self, group: Group, entry: Entry, pieces: tuple[range, ...]) -> None:
        ticket = entry.ticket
        assert isinstance(ticket, Incoming)
        under_way: deque[Callable[[], None]] = deque()
        for positions in runs(pieces):
            buffer = ticket.empty(positions)
            under_way.append(partial(_land, entry, positions, buffer, group.receive(buffer)))
            if len(under_way) == DEEP:
                under_way.popleft()()
        for land in under_way:
            land()
        self._landed(entry, len(pieces))

    def _landed(self, entry: Entry, count: int) -> None:
        entry.at += count
        if entry.at == len(entry.ticket.pieces):  # closed or not, the peer says no more of it
            del self._tickets[entry.number]
            self._end(entry, None)
        elif not entry.open:
            self._forget(entry)


def _pieces(entry: Entry, offer: Offer) -> tuple[range, ...]:
    return entry.ticket.pieces[offer.first : offer.first + offer.pieces]


def _land(entry: Entry, positions: range, buffer: Tensor, received: Pending) -> None:
    """Into the pages; of a ticket that was closed, nowhere: the link is fine, and goes on."""
    received()
    assert isinstance(entry.ticket, Incoming)
    with suppress(Closed):
        entry.touch(partial(entry.ticket.write, positions, buffer))
