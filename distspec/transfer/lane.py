"""What both ends of a link keep to: tickets that may be closed at any time, and a thread for each peer and direction.

Knows the tickets of one life of a worker, and how its lanes reach the boards and links that they share with a peer's.
Does not know what is said there: that is source.py and destination.py.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from distspec.errors import TransferFailed
from distspec.transfer.base import Computed, End, Incoming, Outgoing
from distspec.transfer.group import Group, Rendezvous, Store
from distspec.transfer.meeting import Board, Place, Served, Visited
from distspec.transfer.window import Shown, Window

log = logging.getLogger(__name__)
DEEP = 2
"""Runs of pieces that are under way on a link at a time."""
_LONGEST = 4
"""Pieces of a run. The first is of one, so that the link begins early; what the host does for each then weighs less."""
REFUSED = b"no"
"""The answer to an offer that the destination has no use for, or that stood no more when it had read it."""
READ = b"read"
"""The answer to an offer whose content the destination has read where it was shown."""
AGAIN = b"again"
"""The answer to an offer of what is not computed, for which the destination waited long enough. Any other names a
link."""
Touched = TypeVar("Touched")
Link = Group | Window


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Pieces of a ticket, from the number `first` on; none: no more of it comes. link: the number of the present link,
    or the next one; 0: nothing, an offer that nobody came for. shown: where the content is, once there is a window."""

    ticket: int
    first: int
    pieces: int
    link: int
    shown: Shown | None = None


class MakeLink(Protocol):
    """A link of two over this store; blocks until the other side has come, at most its timeout."""

    def __call__(self, store: Store, rank: int) -> Link: ...


@dataclass(frozen=True, slots=True)
class Ways:
    """From this worker to its peers. board: its own; place_of, timeout_s: see Collective."""

    board: Served
    place_of: Callable[[End], Place]
    make_link: MakeLink
    timeout_s: float

    def visit(self, end: End) -> Board:
        """The board of a peer, through a connection of the calling thread's own."""
        return Visited(self.place_of(end))

    def meet(self, board: Board, prefix: str, rank: int) -> Link:
        return self.make_link(Rendezvous(board, prefix, self.timeout_s), rank)


class Life:
    """Tickets and lanes of one incarnation of this worker."""

    def __init__(self, end: End) -> None:
        self.me = end
        self.is_over = False
        self.tickets: dict[int, Entry] = {}
        self.lanes: dict[tuple[End, type[Lane]], Lane] = {}

    def end_lanes_to_earlier_lives(self, peer: End) -> None:
        """Their threads and links would outlive the peer, one set for each of its deaths."""
        for key in [key for key in self.lanes if key[0].worker == peer.worker]:
            if key[0].incarnation < peer.incarnation:
                self.lanes.pop(key).put(None)

    def end(self) -> None:
        self.is_over = True
        for entry in list(self.tickets.values()):
            if entry.close():
                entry.lane.put(Part(entry))
        for lane in self.lanes.values():
            lane.put(None)


class Entry:
    """A ticket, and whether it is open. Pages are only touched under its lock.

    at: pieces that were handed to the lane (source), or are written (destination). across: pieces that the peer has
    (source), in whatever order it took them. A device may be reading or writing
    pages without the lock, if they are `lent` to it: that ends before the ticket is closed.
    """

    def __init__(self, ticket: Outgoing | Incoming, lane: Lane) -> None:
        self.ticket, self.lane = ticket, lane
        self._lock = threading.Lock()
        self._ends: list[Callable[[], None]] = []
        self.open = True
        self.at = self.across = 0

    @property
    def number(self) -> int:
        return self.ticket.ticket

    def take(self, stop: int) -> tuple[range, ...]:
        """The pieces before `stop` that were not taken yet."""
        before, found = self.at, self.ticket.pieces
        while self.at < len(found) and found[self.at].stop <= stop:
            self.at += 1
        return found[before : self.at]

    def is_last(self, piece: range) -> bool:
        return piece == self.ticket.pieces[-1]

    def close(self) -> bool:
        with self._lock:
            was, self.open = self.open, False
            for end in self._ends:
                try:
                    end()
                except Exception:  # of a device that broke: nobody reads it, nor writes to it
                    log.exception("ticket %d: a device cannot be told that it is over", self.number)
            self._ends.clear()
        return was

    def touch(self, pages: Callable[[], Touched]) -> Touched:
        """Read or write pages. Raises Closed, touching nothing, if the ticket was closed."""
        with self._lock:
            if not self.open:
                raise Closed("the ticket was closed")
            return pages()

    def lend(self, pages: Callable[[], Touched], end: Callable[[], None]) -> Touched:
        """As `touch`; a device goes on with that. Until it is `back`, a close begins with `end`."""

        def lent() -> Touched:
            self._ends.append(end)
            return pages()

        return self.touch(lent)

    def back(self, end: Callable[[], None]) -> None:
        """What was lent so is not touched any more."""
        with self._lock:
            if end in self._ends:
                self._ends.remove(end)

    def finish(self, reason: str | None) -> None:
        if self.close():
            self.ticket.done(reason)


class Closed(TransferFailed):
    """By this side; nobody is to be told why."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a lane is to do: the source sends these pieces; with none, the ticket is new (destination) or was closed."""

    entry: Entry
    pieces: tuple[range, ...] = ()
    computed: Computed | None = None


class Lane(threading.Thread):
    """The tickets between this life and one life of a peer in one direction. rank: 0 sends, 1 receives."""

    rank: int

    def __init__(self, life: Life, peer: End, ways: Ways) -> None:
        super().__init__(name=f"transfer {type(self).__name__} {peer.worker}", daemon=True)
        self._life, self._peer, self._ways = life, peer, ways
        source, destination = (life.me, peer) if self.rank == 0 else (peer, life.me)
        self._prefix = f"{source.worker}.{source.incarnation}>{destination.worker}.{destination.incarnation}"
        self._queue: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._present: Link | None = None
        self.is_letting_go = False
        self._number = 0
        self._turn = 0
        self.start()

    def put(self, part: Part | None) -> None:
        """A part, or None to end the lane after those before."""
        self._queue.put(part)

    def _drop_link(self) -> None:
        link, self._present = self._present, None
        if link is None:
            return
        self.is_letting_go = True
        try:
            link.abort()
        except Exception:  # of a device that broke, too; the lane must still say so of its tickets
            log.exception("a link with %s could not be ended", self._peer.worker)
        self.is_letting_go = False

    def _link(self, number: int, board: Board) -> Link:
        """The link of this number: the present one, or a new one that both sides come to."""
        if self._present is None or self._number != number:
            self._drop_link()
            self._number = number
            self._present = self._ways.meet(board, f"{self._prefix}/link{number}", self.rank)
        return self._present

    def _fail(self, entry: Entry, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if entry.open:
            log.warning("ticket %d with %s failed: %s", entry.number, self._peer.worker, reason)
        self._end(entry, reason)

    def _end(self, entry: Entry, reason: str | None) -> None:
        self._life.tickets.pop(entry.number, None)
        entry.finish(reason)


def runs(pieces: Sequence[range]) -> Iterator[range]:
    """Pieces that follow each other, one, two, then four at a time: what crosses as one tensor."""
    first, size = 0, 1
    while first < len(pieces):
        last = min(first + size, len(pieces)) - 1
        yield range(pieces[first].start, pieces[last].stop)
        first, size = last + 1, min(2 * size, _LONGEST)
