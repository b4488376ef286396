"""The half of a lane that receives: it answers offers in the order of their numbers, and writes what comes.

Knows the peer's board, where both halves meet. Does not know pages: they are written by the ticket.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from torch import Tensor

from distspec.transfer.base import Incoming
from distspec.transfer.group import Group, Pending
from distspec.transfer.lane import DEEP, REFUSED, Closed, Entry, Lane, runs
from distspec.transfer.meeting import Board, Missing

_SLICE_S = 0.2
"""How long to wait for an offer, or a ticket, before looking for the other."""


class Destination(Lane):
    """_over: tickets that are over on one side, of which the other has not heard yet."""

    rank = 1

    def run(self) -> None:
        self._board: Board | None = None
        self._tickets: dict[int, Entry] = {}
        self._over: set[int] = set()
        while self._collect(block=not self._tickets and not self._over):
            try:
                self._serve()
            except Missing:
                continue
            except Exception as error:  # the peer's board is gone or silent; what it offers later is heard later
                self._board = None
                self._over.clear()
                for entry in self._tickets.values():
                    self._fail(entry, error)
                self._tickets.clear()
        self._drop_group()

    def _collect(self, block: bool) -> bool:
        """Tickets that are new or were closed; False if the lane ends."""
        with suppress(queue.Empty):
            while (part := self._queue.get(block)) is not None:
                self._note(part.entry)
                block = False
            return False
        return True

    def _note(self, entry: Entry) -> None:
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
        ticket, count, number = map(int, board.get(f"{key}/offer", _SLICE_S).decode().split())
        self._turn += 1
        if not count:
            board.delete(f"{key}/")
            self._given_up(ticket)
            return
        entry = self._awaited(ticket)
        if entry is None or not entry.open:
            board.set(f"{key}/go", REFUSED.encode())
            return
        if number <= self._number and (self._group is None or number != self._number):
            number = self._number + 1  # that link is broken on this side
        board.set(f"{key}/go", str(number).encode())
        try:
            self._receive(self._link(number, board), entry, count)
        except Exception as error:  # whatever the backend raises, the ticket ends and the link with it
            self._drop_group()
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
        entry.at += count
        if not entry.open:
            self._forget(entry)
        elif entry.at == len(ticket.pieces):
            del self._tickets[entry.number]
            self._end(entry, None)


def _land(entry: Entry, positions: range, buffer: Tensor, received: Pending) -> None:
    """Into the pages; of a ticket that was closed, nowhere: the link is fine, and goes on."""
    received()
    assert isinstance(entry.ticket, Incoming)
    with suppress(Closed):
        entry.touch(partial(entry.ticket.write, positions, buffer))
