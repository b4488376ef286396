"""KV from worker to worker over pairwise `torch.distributed` process groups, gloo or NCCL.

Each worker serves a small board. A pair is linked when first needed, by a group of two that meets at the source's
board; no global group exists, so pools may grow, shrink and lose members. Per ticket the source
writes `ready` and the destination answers `go` there, both naming the link to use; only then is anything
received, since a posted receive holds its device and cannot be taken back. A link that failed is never used
again: the two agree on the next number.

What is sent goes to a buffer first, and what arrives from a buffer to the pages, and both only while the ticket
is open. So a ticket can be closed at once, whatever its link is still doing, and a late write cannot land in
reused pages. A gloo receive cannot be aborted: its thread ends with the timeout at the latest, touching nothing.

Knows no Ray: where a peer's board is, it is told by `place_of`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from distspec.errors import TransferFailed
from distspec.transfer.base import Done, End, Incoming, Outgoing
from distspec.transfer.group import Group, Rendezvous, Store
from distspec.transfer.meeting import Board, Missing, Place, Served, Visited

log = logging.getLogger(__name__)
_SLICE_S = 0.2
_JOIN_S = 1.0
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
        self._lane(ticket.peer, _Source, ticket.ticket, ticket.done).put(ticket)

    def receive(self, ticket: Incoming) -> None:
        self._lane(ticket.peer, _Destination, ticket.ticket, ticket.done).put(ticket)

    def close(self, ticket: int) -> bool:
        state = self._life.tickets.get(ticket)
        return state is not None and state.close()

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

    def _lane(self, peer: End, kind: type[_Source] | type[_Destination], ticket: int, done: Done) -> _Lane:
        life = self._life
        life.tickets[ticket] = _State(ticket, done)
        lane = life.lanes.get((peer, kind))
        if lane is None:
            life.end_lanes_to_earlier_lives(peer)
            lane = life.lanes[peer, kind] = kind(life, peer, self)
        return lane

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
            state.close()
        for lane in self.lanes.values():
            lane.put(None)


class _State:
    """Whether a ticket is open. Pages are only touched under its lock."""

    def __init__(self, number: int, done: Done) -> None:
        self.number = number
        self._done = done
        self._lock = threading.Lock()
        self.open = True

    def close(self) -> bool:
        with self._lock:
            was, self.open = self.open, False
        return was

    def check(self) -> None:
        if not self.open:
            raise TransferFailed("the ticket was closed")

    def touch(self, pages: Callable[[], Touched]) -> Touched:
        """Read or write pages. Raises TransferFailed, touching nothing, if the ticket was closed."""
        with self._lock:
            self.check()
            return pages()

    def finish(self, reason: str | None) -> None:
        if self.close():
            self._done(reason)


class _Lane(threading.Thread):
    """The tickets between this life and one life of a peer in one direction, one after the other."""

    rank: int

    def __init__(self, life: _Life, peer: End, owner: Collective) -> None:
        super().__init__(name=f"transfer {type(self).__name__} {peer.worker}", daemon=True)
        self._life, self._peer, self._owner = life, peer, owner
        self._queue: queue.SimpleQueue[Outgoing | Incoming | None] = queue.SimpleQueue()
        self._board: Board | None = None
        self._group: Group | None = None
        self._number = 0
        self.start()

    def put(self, ticket: Outgoing | Incoming | None) -> None:
        """A ticket, or None to end the lane after those before."""
        self._queue.put(ticket)

    def run(self) -> None:
        while (ticket := self._queue.get()) is not None:
            state = self._life.tickets[ticket.ticket]
            reason = None
            try:
                self._carry(ticket, state)
            except Exception as error:  # whatever the backend raises, the ticket ends and the link with it
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                self._drop_group()
                if state.open:
                    log.warning("ticket %d with %s failed: %s", ticket.ticket, self._peer.worker, reason)
            del self._life.tickets[ticket.ticket]
            state.finish(reason)
        self._drop_group()
        self._leave()

    def _leave(self) -> None:
        """The lane ends."""

    def _carry(self, ticket: Outgoing | Incoming, state: _State) -> None:
        raise NotImplementedError

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

    def _await(self, board: Board, key: str, state: _State, heed_close: bool) -> str:
        """The value of a key that the other side sets."""
        deadline = time.monotonic() + self._owner.timeout_s
        while True:
            if heed_close:
                state.check()
            try:
                return board.get(key, _SLICE_S).decode()
            except Missing:
                if time.monotonic() > deadline:
                    raise TransferFailed(
                        f"{self._peer.worker} did not come within {self._owner.timeout_s:g} s"
                    ) from None


class _Source(_Lane):
    rank = 0

    @property
    def _prefix(self) -> str:
        return _prefix(self._life.me, self._peer)

    def _leave(self) -> None:
        # What was never fetched: refusals of tickets that were closed early, and how links were met. If it is this
        # side's life that is over, the peer may still come for a refusal.
        if self._owner.is_present(self._life):
            self._owner.open_board(None).delete(f"{self._prefix}/")

    def _carry(self, ticket: Outgoing | Incoming, state: _State) -> None:
        assert isinstance(ticket, Outgoing)
        board = self._board = self._board or self._owner.open_board(None)
        prefix = self._prefix
        ready, go = f"{prefix}/{ticket.ticket}/ready", f"{prefix}/{ticket.ticket}/go"
        if not state.open:
            board.set(ready, _REFUSED.encode())
            return
        board.set(ready, str(self._number if self._group is not None else self._number + 1).encode())
        # Closed or not, the answer is awaited: a destination that has said go must see the link come or break.
        answer = self._await(board, go, state, heed_close=False)
        board.delete(f"{prefix}/{ticket.ticket}/")
        if answer == _REFUSED:
            raise TransferFailed(f"{self._peer.worker} has no use for it")
        group = self._link(int(answer), board, prefix)
        for positions in ticket.pieces:
            group.send(state.touch(partial(ticket.read, positions)))


class _Destination(_Lane):
    rank = 1

    def _carry(self, ticket: Outgoing | Incoming, state: _State) -> None:
        assert isinstance(ticket, Incoming)
        board = self._board = self._board or self._owner.open_board(self._peer)
        prefix = _prefix(self._peer, self._life.me)
        ready, go = f"{prefix}/{ticket.ticket}/ready", f"{prefix}/{ticket.ticket}/go"
        try:
            offer = self._await(board, ready, state, heed_close=True)
        except TransferFailed:
            board.set(go, _REFUSED.encode())
            raise
        if offer == _REFUSED:
            raise TransferFailed(f"{self._peer.worker} gave it up")
        number = int(offer)
        if number <= self._number and (self._group is None or number != self._number):
            number = self._number + 1  # that link is broken on this side
        board.set(go, str(number).encode())
        group = self._link(number, board, prefix)
        for positions in ticket.pieces:
            buffer = ticket.empty(positions)
            group.receive(buffer)
            state.touch(partial(ticket.write, positions, buffer))


def _prefix(source: End, destination: End) -> str:
    return f"{source.worker}.{source.incarnation}>{destination.worker}.{destination.incarnation}"
