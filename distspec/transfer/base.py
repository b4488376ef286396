"""What a ticket is, and what carries it.

A ticket moves what is kept of some positions of one request, KV and features, from one worker to another. Its pages
belong to it until it is done or closed: the source's may be read, the destination's may be written. It may begin before
all of its positions are computed: they cross as they come. Knows nothing of requests, slots or pages: reading and
writing are given as functions. Where the destination sees the source's memory it reads there itself, maybe pages of a
ticket that is closed meanwhile: then it keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

Done = Callable[[str | None], None]
"""Told once, on a thread of the transport: None, or why the ticket failed. Never told after `close`."""

Computed = Callable[[], None]
"""Returns when what was launched before it was made is computed; for a thread of the transport."""

MOST_POSITIONS = 256
"""Of a piece: a prompt's last piece cannot leave before the prompt is computed, so pieces are small beside prompts."""


@dataclass(frozen=True, slots=True)
class End:
    """One life of a worker."""

    worker: str
    incarnation: int


class Lies(NamedTuple):
    """What is kept of some positions, where it lies. memory: contiguous tensors that outlive every ticket. note: says
    to `Incoming.pull` where in them, and what they are."""

    memory: tuple[Tensor, ...]
    note: bytes


@dataclass(frozen=True, slots=True)
class Outgoing:
    """read(positions): what is kept of them, one tensor, which is there when it returns; called while the ticket is
    open only, and when `Transport.advance` has named them. lies(positions): where that is, for a destination that sees
    this memory; called likewise. None: nowhere that stays."""

    ticket: int
    peer: End
    pieces: tuple[range, ...]
    read: Callable[[range], Tensor]
    done: Done
    lies: Callable[[range], Lies] | None = None


@dataclass(frozen=True, slots=True)
class Incoming:
    """empty(positions): a buffer of the shape that the source reads. write: called while the ticket is open only; it
    has been written when it returns. pull(positions, addresses, note): launches on the present stream what reads it
    from the source's memory, whose tensors are at these addresses here; the note may be of more positions. Called while
    the ticket is open only, which is not closed until that is done. Given where the source gives `lies`."""

    ticket: int
    peer: End
    pieces: tuple[range, ...]
    empty: Callable[[range], Tensor]
    write: Callable[[range, Tensor], None]
    done: Done
    pull: Callable[[range, Sequence[int], bytes], None] | None = None


class Transport(Protocol):
    """Carries tickets in the background, each from its first piece to its last, several of one pair side by side."""

    def send(self, ticket: Outgoing) -> None:
        """Open a ticket; nothing of it may be read yet."""

    def advance(self, ticket: int, stop: int, computed: Computed) -> None:
        """Positions before `stop` of a ticket that is sent may be read once `computed()` has returned."""

    def receive(self, ticket: Incoming) -> None: ...

    def refuse(self, ticket: int, peer: End) -> None:
        """Tell a ticket's source, which may be sending already, that nothing of it is wanted here."""

    def close(self, ticket: int) -> bool:
        """Give a ticket up. When this returns nothing more is read or written. False if it was done or unknown."""

    def reset(self, incarnation: int) -> None:
        """Begin a new life of this worker: all tickets of the one before are closed, its links given up."""

    def shutdown(self) -> None: ...


def pieces(start: int, length: int, position_bytes: int, piece_bytes: int = 32 << 20) -> tuple[range, ...]:
    """Positions start .. start+length-1 in runs of about piece_bytes; both ends must come to the same answer."""
    step = min(MOST_POSITIONS, max(1, piece_bytes // max(position_bytes, 1)))
    return tuple(range(first, min(first + step, start + length)) for first in range(start, start + length, step))
