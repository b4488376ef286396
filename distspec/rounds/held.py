"""The requests that hold a slot here, and how long each must hold it.

Knows slots, tickets and the order of opening. Does not know what a request computes, or why it is let go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from distspec.engine import Engine
from distspec.errors import BadConstraint
from distspec.muster import Muster
from distspec.protocol.messages import (
    Drafted,
    Extend,
    Fault,
    Freed,
    Lease,
    Progress,
    Refused,
    Revoke,
    Revoked,
    Verdict,
)
from distspec.protocol.values import Node, SamplingParams, Shape
from distspec.rounds.drafting import DraftDesk
from distspec.rounds.work import Work

Reply = Verdict | Progress | Revoked | Drafted | Freed | Refused | Fault
"""What is said of requests that are held here."""


@dataclass(slots=True)
class Held:
    """A request on this worker. Its messages are handled in order; `inbox` are those that wait.

    fresh: nothing of it was begun, what its sequence holds came from the prefix cache. lease: the lease that runs.
    shape: of the drafter's tree in its rounds (None: no drafts). most: nodes of it that are judged. emitted: output
    tokens of the stream, as far as known here. told: length of the drafter's text of it. tickets: when each transfer
    under way began, by number. growing: transfers whose positions are not all computed yet, and what ends each: they
    keep no page from anybody, since that could keep these positions from being computed. receiving: the ticket whose KV
    is on the way here. withdrawn: nodes that were left out, and which nobody has dropped yet. flying: rounds of its
    lease that were launched and not read (see Loop), which may still write to its pages. compiling: the grammar of its
    constraint is not there yet, and its messages wait for that. silent: nobody waits for its Freed.
    """

    request: int
    epoch: int
    slot: int
    params: SamplingParams
    fresh: bool = True
    inbox: deque[Extend | Lease | Revoke] = field(default_factory=deque)
    work: Work | None = None
    lease: Lease | None = None
    shape: Shape | None = None
    most: int = 0
    emitted: int = 0
    told: int = 0
    tickets: dict[int, float] = field(default_factory=dict)
    growing: dict[int, Callable[[], None]] = field(default_factory=dict)
    receiving: int | None = None
    withdrawn: set[int] = field(default_factory=set)
    flying: int = 0
    compiling: bool = False
    silent: bool = False

    @property
    def idle(self) -> bool:
        """The next message may be handled."""
        return self.settled and not self.compiling

    @property
    def settled(self) -> bool:
        """No Extend is being computed, no KV is on the way, no round in flight."""
        return self.receiving is None and not self.flying and (self.work is None or self.lease is not None)

    @property
    def needed(self) -> bool:
        """Somebody may still read or write its pages."""
        return bool(self.tickets) or self.flying > 0

    @property
    def drafting(self) -> bool:
        """A leased round is about to begin, and its drafter was not asked yet."""
        return self.lease is not None and self.work is not None and len(self.work.tokens) == 1 and not self.work.drafted

    @property
    def ahead(self) -> int:
        """Positions from the last committed token on that two rounds of the lease need at most; 0 without one.

        A round needs one for the token, and as many as its nodes: those that are judged, or those that a drafter
        which shares the pages would write. The last output token is never computed, and nothing is drafted for it.
        """
        if self.lease is None:
            return 0
        left, nodes = self.params.max_tokens - self.emitted, 0
        if self.shape is not None and left > 1:
            nodes = max(self.shape.steps * self.shape.topk, self.most)
        return min(2, left) * (1 + nodes)

    def promised(self, length: int) -> int:
        """Committed positions that there will be when all messages that are here are computed; `length` of them are.
        A lease says nothing of the kind."""
        works = [] if self.work is None or self.lease is not None else [self.work.tokens]
        known = 0 if self.fresh else length  # what is cached before anything was begun, the first message brings too
        return known + sum(map(len, works)) + sum(len(m.tokens) for m in self.inbox if isinstance(m, Extend))

    def remaining(self, message: Extend) -> list[Node]:
        """The nodes of a message but for those that were withdrawn, and what hangs on them, which is withdrawn too."""
        nodes = []
        for node in message.nodes:
            if node.id in self.withdrawn or node.parent in self.withdrawn:
                self.withdrawn.add(node.id)
            else:
                nodes.append(node)
        return nodes


class Holdings:
    """Requests by number, oldest first; and dropped ones whose pages a transfer still reads or writes.

    A slot is closed when its request was released, its last ticket has ended and its last round in flight was read,
    whichever comes last, so a late write never lands in pages of somebody else. stop: takes a lease that has ended out
    of the rounds that roll.
    """

    def __init__(
        self, engine: Engine, drafting: DraftDesk | None, muster: Muster, stop: Callable[[Held], None]
    ) -> None:
        self._engine = engine
        self._stop = stop
        self._muster = muster
        self._drafting = drafting
        self._held: dict[int, Held] = {}
        self._constrained: dict[int, Held] = {}
        self._closing: list[Held] = []

    def __iter__(self) -> Iterator[Held]:
        return iter(self._held.values())

    def get(self, request: int) -> Held | None:
        return self._held.get(request)

    def constrained(self) -> list[Held]:
        """Requests whose output a grammar holds, oldest first."""
        return list(self._constrained.values())

    def open(
        self, request: int, epoch: int, tokens: tuple[int, ...], params: SamplingParams, use_cache: bool = True
    ) -> Held:
        """Raises OutOfSlots, BadConstraint."""
        slot = self._engine.open(tokens, params, use_cache)
        try:
            compiling = not self._engine.is_ready(slot)
        except BadConstraint:
            self._engine.close(slot)
            raise
        held = self._held[request] = Held(request, epoch, slot, params, compiling=compiling)
        if params.constraint is not None:
            self._constrained[request] = held
        return held

    def release(self, held: Held) -> bool:
        """Let a request go. False if its slot has to wait for the end of a ticket, or of a round in flight."""
        del self._held[held.request]
        self._constrained.pop(held.request, None)
        self._muster.left(held.request)
        held.work = held.lease = None
        held.inbox.clear()
        self._stop(held)
        for cut in held.growing.values():
            cut()
        held.growing.clear()
        if self._drafting is not None:
            self._drafting.forget(held.request)
        if held.needed:
            self._closing.append(held)
            return False
        self._engine.close(held.slot)
        return True

    def give_up(self, held: Held, reason: str, task: int | None = None) -> Refused:
        """Free a request that cannot go on here. task: the future that ends, else that of its work or inbox."""
        waiting = ([held.work.message] if held.work else []) + list(held.inbox)
        tasks = [task] if task is not None else [m.task for m in waiting if isinstance(m, Extend)]
        held.silent = True  # the Refused says it, once
        self.release(held)
        return Refused(request=held.request, epoch=held.epoch, reason=reason, task=tasks[0] if tasks else None)

    def newest(self) -> Held | None:
        """The request opened last among those whose pages would be free at once."""
        return next((held for held in reversed(self._held.values()) if not held.needed), None)

    def of_ticket(self, request: int, ticket: int) -> Held | None:
        """The request, released or not, that this ticket keeps here."""
        known = self._held.get(request)
        for held in (*self._closing, *([known] if known else [])):
            if held.request == request and ticket in held.tickets:
                return held
        return None

    def end_ticket(self, held: Held, ticket: int) -> list[Freed]:
        """A ticket has ended; see `sweep`."""
        del held.tickets[ticket]
        if held.receiving == ticket:
            held.receiving = None
        return self.sweep()

    def sweep(self) -> list[Freed]:
        """Close what was released and nobody needs any more; say Freed of it."""
        done = [held for held in self._closing if not held.needed]
        for held in done:
            self._closing.remove(held)
            self._engine.close(held.slot)
        return [Freed(request=held.request, epoch=held.epoch) for held in done if not held.silent]

    def reset(self) -> None:
        """Let all requests go; nobody waits for a Freed any more."""
        for held in list(self):
            self.release(held)
        for held in self._closing:
            held.silent = True
        self.sweep()
