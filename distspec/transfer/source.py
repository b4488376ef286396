"""The half of a lane that sends: it offers what is computed, and sends what the destination takes.

Knows its own board, where both halves meet. Does not know pages: they are read by the ticket.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from distspec.errors import TransferFailed
from distspec.transfer.base import Outgoing
from distspec.transfer.group import Pending
from distspec.transfer.lane import DEEP, REFUSED, Closed, Entry, Lane, Part, runs
from distspec.transfer.meeting import Missing


class Source(Lane):
    rank = 0

    def run(self) -> None:
        while (part := self._queue.get()) is not None:
            if not part.pieces:
                if part.entry.number in self._life.tickets:  # else it ended just before it was closed
                    self._give_up(part.entry)
            elif part.entry.open:
                self._try(part)
        self._drop_group()
        # What was never fetched: how links were met, and tickets that were given up. If it is this side's life that is
        # over, the peer may still come to hear that.
        if not self._life.is_over:
            self._ways.board.delete(f"{self._prefix}/")

    def _try(self, part: Part) -> None:
        entry = part.entry
        try:
            taken = self._carry(part)
        except Closed:
            self._drop_group()  # the peer was promised more; that the ticket is over, it is told by what comes next
        except Exception as error:  # whatever the backend raises, the ticket ends and the link with it
            self._drop_group()
            self._fail(entry, error)
            self._give_up(entry)
        else:
            if not taken:
                self._end(entry, f"{self._peer.worker} has no use for it")
                self._give_up(entry)
            elif entry.is_last(part.pieces[-1]):
                self._end(entry, None)

    def _give_up(self, entry: Entry) -> None:
        """Tell the peer that no more of this ticket comes. It removes the message."""
        self._life.tickets.pop(entry.number, None)
        self._offer(entry.number, 0)

    def _offer(self, ticket: int, count: int) -> str:
        """Where the answer will be."""
        key = f"{self._prefix}/{self._turn}"
        self._turn += 1
        number = self._number if self._group is not None else self._number + 1
        self._ways.board.set(f"{key}/offer", f"{ticket} {count} {number}".encode())
        return key

    def _carry(self, part: Part) -> bool:
        """False if the peer does not want it."""
        ticket = part.entry.ticket
        assert isinstance(ticket, Outgoing)
        assert part.computed is not None
        part.computed()
        key = self._offer(ticket.ticket, len(part.pieces))
        # Closed or not, the answer is awaited: a destination that has said go must see the link come or break.
        answer = self._answer(key, ticket.ticket)
        self._ways.board.delete(f"{key}/")
        if answer == REFUSED:
            return False
        group = self._link(int(answer), self._ways.board)
        under_way: deque[Pending] = deque()
        for positions in runs(part.pieces):
            under_way.append(group.send(part.entry.touch(partial(ticket.read, positions))))
            if len(under_way) == DEEP:
                under_way.popleft()()
        for pending in under_way:
            pending()
        return True

    def _answer(self, key: str, ticket: int) -> str:
        try:
            return self._ways.board.get(f"{key}/go", self._ways.timeout_s).decode()
        except Missing:
            self._ways.board.set(f"{key}/offer", f"{ticket} 0 0".encode())  # for a peer that comes after all
            raise TransferFailed(f"{self._peer.worker} did not come within {self._ways.timeout_s:g} s") from None
