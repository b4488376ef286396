"""The half of a lane that sends: it offers what is computed, and shows or sends what the destination takes.

What is shown through a window is offered without waiting for the answers to what was before, as far as the window has
seats; and a ticket's last pieces, whose way is all that is left to wait for when they are computed, are offered before
that. All else is offered one by one, when it is computed. Answers are taken in the order of the offers.

Knows its own board, where both halves meet. Does not know pages: they are read by the ticket, or where it says.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from distspec.errors import TransferFailed
from distspec.transfer.aside import is_done
from distspec.transfer.base import Lies, Outgoing
from distspec.transfer.group import Group, Pending
from distspec.transfer.lane import AGAIN, DEEP, READ, REFUSED, Closed, Entry, Lane, Offer, Part, runs
from distspec.transfer.meeting import Missing
from distspec.transfer.window import SEATS, Shown, Window

_SHOWN = 16
"""Pieces of one offer at most that the destination reads where they lie: it closes a ticket when it has read those."""


@dataclass(frozen=True, slots=True)
class _Offered:
    """A part of which the answer will be at `key`. end: what ends its showing, if it is shown where it lies, at a seat
    of the window."""

    part: Part
    key: str
    deadline_s: float
    seat: int
    end: Callable[[], None] | None

    @property
    def entry(self) -> Entry:
        return self.part.entry


class Source(Lane):
    rank = 0

    def run(self) -> None:
        self._under_way: deque[_Offered] = deque()
        while (part := self._next()) is not None:
            if not part.pieces:
                self._settle()  # whatever the answers, this comes after them
                self._give_up(part.entry)
            elif part.entry.open:
                self._try(part.entry, partial(self._carry, part))
        self._settle()
        self._drop_link()
        # What was never fetched: how links were met, and tickets that were given up. If it is this side's life that is
        # over, the peer may still come to hear that.
        if not self._life.is_over:
            self._ways.board.delete(f"{self._prefix}/")

    def put(self, part: Part | None) -> None:
        super().put(part)
        self._ways.board.nudge()

    def _next(self) -> Part | None:
        """What is to be done, as soon as there is something: until then answers are taken."""
        while self._under_way and self._queue.empty():
            oldest = self._under_way[0]
            left_s = max(0.0, oldest.deadline_s - time.monotonic())
            self._ways.board.wait(f"{oldest.key}/go", left_s, unless=lambda: not self._queue.empty())
            if self._queue.empty():
                self._settle(len(self._under_way) - 1)
        return self._queue.get()

    def _settle(self, left: int = 0) -> None:
        """Take answers until no more than so many offers are left without."""
        while len(self._under_way) > left:
            offered = self._under_way.popleft()
            self._try(offered.entry, partial(self._answered, offered))

    def _try(self, entry: Entry, action: Callable[[], None]) -> None:
        try:
            action()
        except Closed:
            return  # that the ticket is over, the peer is told by what comes next
        except Exception as error:  # whatever the backend raises, the ticket ends and the link with it
            self._drop_link()
            self._give_up(entry)
            self._fail(entry, error)

    def _give_up(self, entry: Entry) -> None:
        """Tell the peer that no more of this ticket comes, if it is not over yet. It removes the message."""
        if self._life.tickets.pop(entry.number, None) is not None:
            self._offer(Offer(entry.number, 0, 0, self._next_link))

    def _offer(self, offer: Offer) -> str:
        """Where the answer will be."""
        key = f"{self._prefix}/{self._turn}"
        self._turn += 1
        self._ways.board.set(f"{key}/offer", msgspec.msgpack.encode(offer))
        return key

    @property
    def _next_link(self) -> int:
        return self._number if self._present is not None else self._number + 1

    def _carry(self, part: Part) -> None:
        """Offer all of it; answers may be left."""
        left = part.pieces
        while left:
            some = replace(part, pieces=left[:_SHOWN])
            self._await(some)
            window, lies = self._present, _where(part)
            if not isinstance(window, Window):
                self._leave(replace(part, pieces=left))
                return
            if lies is None:
                some = replace(part, pieces=left[:1])
                self._stage(window, some)
            else:
                self._show(window, lies, some)
            left = left[len(some.pieces) :]

    def _await(self, part: Part) -> None:
        """That one more may be under way, and that it is computed, if it must be when it is offered."""
        assert part.computed is not None
        is_shown = isinstance(self._present, Window) and _where(part) is not None
        self._settle(SEATS - 1 if is_shown else 0)
        if not is_done(part.computed) and not self._is_ahead(part):
            self._settle()  # who is done may go meanwhile
            part.computed()

    def _is_ahead(self, part: Part) -> bool:
        """Whether it may be shown before it is computed."""
        window = self._present
        sees = isinstance(window, Window) and window.waits and _where(part) is not None
        return sees and part.entry.is_last(part.pieces[-1])

    def _stage(self, window: Window, part: Part) -> None:
        ticket = part.entry.ticket
        assert isinstance(ticket, Outgoing)
        content = part.entry.touch(partial(ticket.read, part.pieces[0]))
        self._leave(part, window.stage(content, self._seat()), self._seat())

    def _show(self, window: Window, lies: Callable[[range], Lies], part: Part) -> None:
        assert part.computed is not None
        seat, positions = self._seat(), range(part.pieces[0].start, part.pieces[-1].stop)
        end = partial(window.revoke, seat)
        shown = part.entry.lend(lambda: window.show(lies(positions), seat), end)
        if not is_done(part.computed) and self._is_ahead(part):
            shown = window.ahead(shown, part.computed)
        self._leave(part, shown, seat, end)

    def _seat(self) -> int:
        """One where nothing is shown."""
        taken = {offered.seat for offered in self._under_way}
        return next(seat for seat in range(SEATS) if seat not in taken)

    def _leave(
        self, part: Part, shown: Shown | None = None, seat: int = 0, end: Callable[[], None] | None = None
    ) -> None:
        """Offer it; the answer is for later."""
        ticket = part.entry.ticket
        first = ticket.pieces.index(part.pieces[0])
        key = self._offer(Offer(ticket.ticket, first, len(part.pieces), self._next_link, shown))
        self._under_way.append(_Offered(part, key, time.monotonic() + self._ways.timeout_s, seat, end))

    def _answered(self, offered: _Offered) -> None:
        # Closed or not, the answer is awaited: a destination that has said go must see the link come or break.
        answer = self._answer(offered)
        entry, part = offered.entry, offered.part
        if offered.end is not None:
            entry.back(offered.end)
        if answer == REFUSED:
            self._give_up(entry)
            self._end(entry, f"{self._peer.worker} has no use for it")
            return
        if answer == AGAIN:
            assert part.computed is not None
            part.computed()
            self._carry(part)
            return
        if answer != READ:
            link = self._link(int(answer), self._ways.board)
            if isinstance(link, Window):
                self._carry(part)
                return
            self._send(link, entry, part.pieces)
        entry.across += len(part.pieces)
        if entry.across == len(entry.ticket.pieces):  # those before the last one may have been offered again
            self._end(entry, None)

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

    def _answer(self, offered: _Offered) -> bytes:
        board, key = self._ways.board, offered.key
        try:
            answer = board.get(f"{key}/go", max(0.0, offered.deadline_s - time.monotonic()))
        except Missing:
            # Who comes after all finds nothing in it, and behind it that the ticket was given up.
            board.set(f"{key}/offer", msgspec.msgpack.encode(Offer(offered.entry.number, 0, 0, 0)))
            reason = f"{self._peer.worker} did not come within {self._ways.timeout_s:g} s"
            raise TransferFailed(reason) from None
        board.delete(f"{key}/")
        return answer


def _where(part: Part) -> Callable[[range], Lies] | None:
    """See Outgoing.lies."""
    ticket = part.entry.ticket
    assert isinstance(ticket, Outgoing)
    return ticket.lies
