"""The half of a lane that sends: it offers what is computed, and shows or sends what the destination takes.

Knows its own board, where both halves meet. Does not know pages: they are read by the ticket, or where it says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec

from distspec.errors import TransferFailed
from distspec.transfer.base import Lies, Outgoing
from distspec.transfer.group import Group, Pending
from distspec.transfer.lane import DEEP, READ, REFUSED, Closed, Entry, Lane, Offer, Part, runs
from distspec.transfer.meeting import Missing
from distspec.transfer.window import Shown, Window


class Source(Lane):
    rank = 0

    def run(self) -> None:
        while (part := self._queue.get()) is not None:
            if not part.pieces:
                if part.entry.number in self._life.tickets:  # else it ended just before it was closed
                    self._give_up(part.entry)
            elif part.entry.open:
                self._try(part)
        self._drop_link()
        # What was never fetched: how links were met, and tickets that were given up. If it is this side's life that is
        # over, the peer may still come to hear that.
        if not self._life.is_over:
            self._ways.board.delete(f"{self._prefix}/")

    def _try(self, part: Part) -> None:
        entry = part.entry
        try:
            taken = self._carry(part)
        except Closed:
            return  # that the ticket is over, the peer is told by what comes next
        except Exception as error:  # whatever the backend raises, the ticket ends and the link with it
            self._drop_link()
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

    def _offer(self, ticket: int, pieces: int, shown: Shown | None = None) -> str:
        """Where the answer will be."""
        key = f"{self._prefix}/{self._turn}"
        self._turn += 1
        number = self._number if self._present is not None else self._number + 1
        offer = Offer(ticket, pieces, number, shown)
        self._ways.board.set(f"{key}/offer", msgspec.msgpack.encode(offer))
        return key

    def _carry(self, part: Part) -> bool:
        """False if the peer does not want it."""
        left = part.pieces
        while left:
            offered, shown = self._show(part, left)
            key = self._offer(part.entry.number, len(offered), shown)
            # Closed or not, the answer is awaited: a destination that has said go must see the link come or break.
            answer = self._answer(key, part.entry.number)
            part.entry.hide()
            if answer == REFUSED:
                return False
            if answer == READ:
                left = left[len(offered) :]
            elif not isinstance(link := self._link(int(answer), self._ways.board), Window):
                self._send(link, part.entry, left)
                return True
        return True

    def _show(self, part: Part, left: tuple[range, ...]) -> tuple[tuple[range, ...], Shown | None]:
        """What to offer of these pieces, once they are computed: all, but for what fits a stage."""
        window, ticket, computed = self._present, part.entry.ticket, part.computed
        assert isinstance(ticket, Outgoing)
        assert computed is not None
        if isinstance(window, Window) and ticket.lies is not None:
            positions = range(left[0].start, left[-1].stop)
            shown = part.entry.show(partial(_shown, window, ticket.lies, positions), window.revoke)
            computed()
            return left, shown
        computed()
        if not isinstance(window, Window):
            return left, None
        return left[:1], window.stage(part.entry.touch(partial(ticket.read, left[0])))

    def _send(self, group: Group, entry: Entry, pieces: tuple[range, ...]) -> None:
        ticket = entry.ticket
        assert isinstance(ticket, Outgoing)
        under_way: deque[Pending] = deque()
        try:
            for positions in runs(pieces):
                under_way.append(group.send(entry.touch(partial(ticket.read, positions))))
                if len(under_way) == DEEP:
                    under_way.popleft()()
        except Closed:
            self._drop_link()  # the peer was promised more
            raise
        for pending in under_way:
            pending()

    def _answer(self, key: str, ticket: int) -> bytes:
        board = self._ways.board
        try:
            answer = board.get(f"{key}/go", self._ways.timeout_s)
        except Missing:
            # Who comes after all finds nothing in it, and behind it that the ticket was given up.
            board.set(f"{key}/offer", msgspec.msgpack.encode(Offer(ticket, 0, 0)))
            raise TransferFailed(f"{self._peer.worker} did not come within {self._ways.timeout_s:g} s") from None
        board.delete(f"{key}/")
        return answer


def _shown(window: Window, lies: Callable[[range], Lies], positions: range) -> Shown:
    return window.show(lies(positions))
