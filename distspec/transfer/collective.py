"""KV from worker to worker over links of two, each made when first needed.

Each worker serves a small board. A pair is linked by a group of two that meets at the source's board; no global group
exists, so pools may grow, shrink and lose members. Tickets cross in parts: as soon as pieces of one are computed, the
source offers them there, and the destination answers which link they may come by; only then is anything received, since
a posted receive holds its device and cannot be taken back. Offers of a pair and direction are numbered, so that tickets
which wait for their positions hold up no other. A link that failed is never used again: the two agree on the next
number.

What is sent goes to a buffer first, and what arrives from a buffer to the pages, and both only while the ticket
is open. So a ticket can be closed at once, whatever its link is still doing, and a late write cannot land in
reused pages. Two runs of pieces are under way at a time, so that a link does not wait for pages to be read and written.
A gloo receive cannot be aborted: its thread ends with the timeout at the latest, touching nothing.

Knows no Ray: where a peer's board is, it is told by `place_of`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor

from distspec.errors import TransferFailed
from distspec.transfer.base import Computed, End, Incoming, Outgoing
from distspec.transfer.group import Group, Pending, Rendezvous, Store
from distspec.transfer.meeting import Board, Missing, Place, Served, Visited

log = logging.getLogger(__name__)
_SLICE_S = 0.2
_JOIN_S = 1.0
_DEEP = 2
"""Runs of pieces that are under way on a link at a time."""
_LONGEST = 4
"""Pieces of a run. The first is of one, so that the link begins early; what the host does for each then weighs less."""
_REFUSED = "no"
Touched = TypeVar("Touched")


class MakeGroup(Protocol):
    """A group of two over this store; blocks until the other side has come, at most its timeout."""

    def __call__(self, store: Store, rank: int) -> Group: ...


class Collective:
    """The transport of one worker.

    host: this machine's address for its peers. place_of(end): the board of a peer's life; may block, and raises
    for a life that is over. timeout_s: silence after which a ticket fails.
    """

    def __init__(
        self,
        worker: str,
        host: str,
        make_group: MakeGroup,
        place_of: Callable[[End], Place],
        *,
        timeout_s: float = 20.0,
    ) -> None:
        self._worker = worker
        self._make_group = make_group
        self._place_of = place_of
        self._timeout_s = timeout_s
        self._board = Served(host)
        self._life = _Life(End(worker, 0))

    def send(self, ticket: Outgoing) -> None:
        self._open(_Source, ticket)

    def advance(self, ticket: int, stop: int, computed: Computed) -> None:
        state = self._life.tickets.get(ticket)
        if state is not None and (pieces := state.take(stop)):
            state.lane.put(_Part(state, pieces, computed))

    def receive(self, ticket: Incoming) -> None:
        state = self._open(_Destination, ticket)
        state.lane.put(_Part(state))

    def close(self, ticket: int) -> bool:
        state = self._life.tickets.get(ticket)
        if state is None or not state.close():
            return False
        state.lane.put(_Part(state))  # so that the peer is told
        return True

    def reset(self, incarnation: int) -> None:
        life, self._life = self._life, _Life(End(self._worker, incarnation))
        life.end()

    def shutdown(self) -> None:
        """Close everything; waits a moment for the threads to let go of their links."""
        lanes = list(self._life.lanes.values())
        self.reset(0)
        self._board.close()
        for lane in lanes:
            lane.join(_JOIN_S)

    def _open(self, kind: type[_Source] | type[_Destination], ticket: Outgoing | Incoming) -> _State:
        life = self._life
        lane = life.lanes.get((ticket.peer, kind))
        if lane is None:
            life.end_lanes_to_earlier_lives(ticket.peer)
            lane = life.lanes[ticket.peer, kind] = kind(life, ticket.peer, self)
        state = life.tickets[ticket.ticket] = _State(ticket, lane)
        return state

    def is_present(self, life: _Life) -> bool:
        return life is self._life

    @property
    def place(self) -> Place:
        """This worker's board: what its peers need."""
        return self._board.place

    def open_board(self, end: End | None) -> Board:
        """The board of a peer, through a connection of the calling thread's own; None: this worker's."""
        return self._board if end is None else Visited(self._place_of(end))

    def make_group(self, board: Board, prefix: str, rank: int) -> Group:
        return self._make_group(Rendezvous(board, prefix, self._timeout_s), rank)

    @property
    def timeout_s(self) -> float:
        return self._timeout_s


class _Life:
    """Tickets and lanes of one incarnation of this worker."""

    def __init__(self, end: End) -> None:
        self.me = end
        self.tickets: dict[int, _State] = {}
        self.lanes: dict[tuple[End, type[_Lane]], _Lane] = {}

    def end_lanes_to_earlier_lives(self, peer: End) -> None:
        """Their threads and links would outlive the peer, one set for each of its deaths."""
        for key in [key for key in self.lanes if key[0].worker == peer.worker]:
            if key[0].incarnation < peer.incarnation:
                self.lanes.pop(key).put(None)

    def end(self) -> None:
        for state in list(self.tickets.values()):
            if state.close():
                state.lane.put(_Part(state))
        for lane in self.lanes.values():
            lane.put(None)


class _State:
    """A ticket, and whether it is open. Pages are only touched under its lock.

    at: pieces that were handed to the lane (source), or are written (destination).
    """

    def __init__(self, ticket: Outgoing | Incoming, lane: _Lane) -> None:
        self.ticket, self.lane = ticket, lane
        self._lock = threading.Lock()
        self.open = True
        self.at = 0

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
        return was

    def touch(self, pages: Callable[[], Touched]) -> Touched:
        """Read or write pages. Raises _Closed, touching nothing, if the ticket was closed."""
        with self._lock:
            if not self.open:
                raise _Closed("the ticket was closed")
            return pages()

    def finish(self, reason: str | None) -> None:
        if self.close():
            self.ticket.done(reason)


class _Closed(TransferFailed):
    """By this side; nobody is to be told why."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What a lane is to do: the source sends these pieces; with none, the ticket is new (destination) or was closed."""

    state: _State
    pieces: tuple[range, ...] = ()
    computed: Computed | None = None


class _Lane(threading.Thread):
    """The tickets between this life and one life of a peer in one direction."""

    rank: int

    def __init__(self, life: _Life, peer: End, owner: Collective) -> None:
        super().__init__(name=f"transfer {type(self).__name__} {peer.worker}", daemon=True)
        self._life, self._peer, self._owner = life, peer, owner
        self._queue: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._group: Group | None = None
        self._number = 0
        self._turn = 0
        self.start()

    def put(self, part: _Part | None) -> None:
        """A part, or None to end the lane after those before."""
        self._queue.put(part)

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None

    def _link(self, number: int, board: Board, prefix: str) -> Group:
        """The link of this number: the present one, or a new one that both sides come to."""
        if self._group is None or self._number != number:
            self._drop_group()
            self._number = number
            self._group = self._owner.make_group(board, f"{prefix}/link{number}", self.rank)
        return self._group

    def _fail(self, state: _State, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if state.open:
            log.warning("ticket %d with %s failed: %s", state.number, self._peer.worker, reason)
        self._end(state, reason)

    def _end(self, state: _State, reason: str | None) -> None:
        self._life.tickets.pop(state.number, None)
        state.finish(reason)


class _Source(_Lane):
    rank = 0

    def run(self) -> None:
        self._board = self._owner.open_board(None)
        self._prefix = _prefix(self._life.me, self._peer)
        while (part := self._queue.get()) is not None:
            if not part.pieces:
                if part.state.number in self._life.tickets:  # else it ended just before it was closed
                    self._give_up(part.state)
            elif part.state.open:
                self._try(part)
        self._drop_group()
        # What was never fetched: how links were met, and tickets that were given up. If it is this side's life that is
        # over, the peer may still come to hear that.
        if self._owner.is_present(self._life):
            self._board.delete(f"{self._prefix}/")

    def _try(self, part: _Part) -> None:
        state = part.state
        try:
            taken = self._carry(part)
        except _Closed:
            self._drop_group()  # the peer was promised more; that the ticket is over, it is told by what comes next
        except Exception as error:  # whatever the backend raises, the ticket ends and the link with it
            self._drop_group()
            self._fail(state, error)
            self._give_up(state)
        else:
            if not taken:
                self._end(state, f"{self._peer.worker} has no use for it")
                self._give_up(state)
            elif state.is_last(part.pieces[-1]):
                self._end(state, None)

    def _give_up(self, state: _State) -> None:
        """Tell the peer that no more of this ticket comes. It removes the message."""
        self._life.tickets.pop(state.number, None)
        self._offer(state.number, 0)

    def _offer(self, ticket: int, count: int) -> str:
        """Where the answer will be."""
        key = f"{self._prefix}/{self._turn}"
        self._turn += 1
        number = self._number if self._group is not None else self._number + 1
        self._board.set(f"{key}/offer", f"{ticket} {count} {number}".encode())
        return key

    def _carry(self, part: _Part) -> bool:
        """False if the peer does not want it."""
        ticket = part.state.ticket
        assert isinstance(ticket, Outgoing)
        assert part.computed is not None
        part.computed()
        key = self._offer(ticket.ticket, len(part.pieces))
        # Closed or not, the answer is awaited: a destination that has said go must see the link come or break.
        answer = self._answer(key, ticket.ticket)
        self._board.delete(f"{key}/")
        if answer == _REFUSED:
            return False
        group = self._link(int(answer), self._board, self._prefix)
        under_way: deque[Pending] = deque()
        for positions in runs(part.pieces):
            under_way.append(group.send(part.state.touch(partial(ticket.read, positions))))
            if len(under_way) == _DEEP:
                under_way.popleft()()
        for pending in under_way:
            pending()
        return True

    def _answer(self, key: str, ticket: int) -> str:
        try:
            return self._board.get(f"{key}/go", self._owner.timeout_s).decode()
        except Missing:
            self._board.set(f"{key}/offer", f"{ticket} 0 0".encode())  # for a peer that comes after all
            raise TransferFailed(f"{self._peer.worker} did not come within {self._owner.timeout_s:g} s") from None


class _Destination(_Lane):
    """_over: tickets that are over on one side, of which the other has not heard yet."""

    rank = 1

    def run(self) -> None:
        self._board: Board | None = None
        self._prefix = _prefix(self._peer, self._life.me)
        self._tickets: dict[int, _State] = {}
        self._over: set[int] = set()
        while self._collect(block=not self._tickets and not self._over):
            try:
                self._serve()
            except Missing:
                continue
            except Exception as error:  # the peer's board is gone or silent; what it offers later is heard later
                self._board = None
                self._over.clear()
                for state in self._tickets.values():
                    self._fail(state, error)
                self._tickets.clear()
        self._drop_group()

    def _collect(self, block: bool) -> bool:
        """Tickets that are new or were closed; False if the lane ends."""
        with suppress(queue.Empty):
            while (part := self._queue.get(block)) is not None:
                self._note(part.state)
                block = False
            return False
        return True

    def _note(self, state: _State) -> None:
        if not state.open:
            self._forget(state)
        elif state.number in self._over:
            self._over.remove(state.number)
            self._end(state, f"{self._peer.worker} gave it up")
        else:
            self._tickets[state.number] = state

    def _forget(self, state: _State) -> None:
        """It is over here; the peer may offer it all the same."""
        self._life.tickets.pop(state.number, None)
        self._tickets.pop(state.number, None)
        self._over.add(state.number)

    def _serve(self) -> None:
        """One offer. Raises Missing if there is none, TransferFailed if the peer's board is gone."""
        board = self._board = self._board or self._owner.open_board(self._peer)
        key = f"{self._prefix}/{self._turn}"
        ticket, count, number = map(int, board.get(f"{key}/offer", _SLICE_S).decode().split())
        self._turn += 1
        if not count:
            board.delete(f"{key}/")
            self._given_up(ticket)
            return
        state = self._awaited(ticket)
        if state is None or not state.open:
            board.set(f"{key}/go", _REFUSED.encode())
            return
        if number <= self._number and (self._group is None or number != self._number):
            number = self._number + 1  # that link is broken on this side
        board.set(f"{key}/go", str(number).encode())
        try:
            self._receive(self._link(number, board, self._prefix), state, count)
        except Exception as error:  # whatever the backend raises, the ticket ends and the link with it
            self._drop_group()
            self._fail(state, error)
            self._forget(state)

    def _given_up(self, ticket: int) -> None:
        state = self._tickets.pop(ticket, None)
        if state is not None:
            self._end(state, f"{self._peer.worker} gave it up")
        elif ticket in self._over:
            self._over.remove(ticket)
        else:
            self._over.add(ticket)  # this side will hear of it

    def _awaited(self, ticket: int) -> _State | None:
        """An offered ticket, which this side may not have heard of yet."""
        deadline = time.monotonic() + self._owner.timeout_s
        while ticket not in self._tickets and ticket not in self._over and time.monotonic() < deadline:
            with suppress(queue.Empty):
                part = self._queue.get(timeout=_SLICE_S)
                if part is None:
                    self._queue.put(None)
                    break
                self._note(part.state)
        return self._tickets.get(ticket)

    def _receive(self, group: Group, state: _State, count: int) -> None:
        ticket = state.ticket
        assert isinstance(ticket, Incoming)
        under_way: deque[Callable[[], None]] = deque()
        for positions in runs(ticket.pieces[state.at : state.at + count]):
            buffer = ticket.empty(positions)
            under_way.append(partial(_land, state, positions, buffer, group.receive(buffer)))
            if len(under_way) == _DEEP:
                under_way.popleft()()
        for land in under_way:
            land()
        state.at += count
        if not state.open:
            self._forget(state)
        elif state.at == len(ticket.pieces):
            del self._tickets[state.number]
            self._end(state, None)


def runs(pieces: Sequence[range]) -> Iterator[range]:
    """Pieces that follow each other, one, two, then four at a time: what crosses as one tensor."""
    first, size = 0, 1
    while first < len(pieces):
        last = min(first + size, len(pieces)) - 1
        yield range(pieces[first].start, pieces[last].stop)
        first, size = last + 1, min(2 * size, _LONGEST)


def _land(state: _State, positions: range, buffer: Tensor, received: Pending) -> None:
    """Into the pages; of a ticket that was closed, nowhere: the link is fine, and goes on."""
    received()
    assert isinstance(state.ticket, Incoming)
    with suppress(_Closed):
        state.touch(partial(state.ticket.write, positions, buffer))


def _prefix(source: End, destination: End) -> str:
    return f"{source.worker}.{source.incarnation}>{destination.worker}.{destination.incarnation}"
