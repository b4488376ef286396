"""A simulated target worker: real books of KV pages, a memory that holds tokens, a toy model, virtual time.

Every outcome is computed from what the memory holds at the pages that the books name, so a verdict is wrong
or an error whenever the coordinator asks where the path was never computed. Knows messages and books. Does
not know the coordinator's state.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from random import Random

from distspec.errors import OutOfPages
from distspec.kv.pages import PageAllocator
from distspec.kv.radix import PrefixCache
from distspec.kv.sequence import Books, Sequence
from distspec.protocol.messages import (
    ROOT,
    Draft,
    Drop,
    Extend,
    Freed,
    FromWorker,
    Lease,
    Node,
    Progress,
    Received,
    ReceiveKV,
    Refused,
    Revoke,
    Revoked,
    SamplingParams,
    SendKV,
    TransferLost,
    Verdict,
    finish_reason,
)
from distspec.sim.drafter import SimDrafter
from distspec.sim.model import ToyModel
from distspec.sim.violation import Violation


@dataclass(slots=True)
class Packet:
    """KV on its way from worker to worker: what the source's memory held."""

    request: int
    ticket: int
    cells: list[tuple[int, int]]


@dataclass(slots=True)
class Open:
    """A request that is open here. arrival: order of opening, the newest is given up first."""

    sequence: Sequence
    params: SamplingParams
    epoch: int
    arrival: int
    lease: Lease | None = None
    emitted: int = 0
    awaiting: ReceiveKV | None = None
    tokens: list[int] = field(default_factory=list)


class SimTarget:
    """One target worker of any role. `handle` takes one message and returns replies and packets to send."""

    def __init__(
        self,
        name: str,
        model: ToyModel,
        rng: Random,
        drafter: SimDrafter | None,
        *,
        pages: int,
        page_size: int,
        slots: int,
        room: int,
    ) -> None:
        self.name, self.model, self.rng, self.drafter = name, model, rng, drafter
        self.slots, self.room, self.page_size = slots, room, page_size
        self.allocator = PageAllocator(pages, page_size)
        self.books = Books(self.allocator, PrefixCache(self.allocator))
        self.memory: list[tuple[int, int]] = [(-1, -1)] * (pages * page_size)
        self.open: dict[int, Open] = {}
        self.arrivals = 0
        self.replies: list[FromWorker] = []
        self.packets: list[tuple[str, Packet]] = []
        self.early: dict[int, Packet] = {}
        self.rounds_accept = 0.7

    def handle(self, message: object) -> list[FromWorker]:
        """Replies to one message, in order."""
        self.replies = []
        match message:
            case Extend():
                self._extend(message)
            case Lease():
                self._lease(message)
            case Revoke():
                self._revoke(message)
            case Drop():
                self._drop(message)
            case SendKV():
                self._send_kv(message)
            case ReceiveKV():
                self._receive_kv(message)
            case Packet():
                self._packet(message)
            case Draft() if self.drafter is not None:
                self.replies += self.drafter.handle(message)
            case _:
                raise Violation(f"{self.name} got {type(message).__name__}")
        return self.replies

    def lose(self, packet: Packet, is_source: bool) -> list[FromWorker]:
        """A link broke under this ticket; a receiver that has not heard of it yet cannot say so (no reply)."""
        self.replies = []
        entry = self.open.get(packet.request)
        awaited = entry is not None and entry.awaiting is not None and entry.awaiting.ticket == packet.ticket
        if awaited:
            self._close(packet.request)
        if awaited or is_source:
            lost = TransferLost(
                request=packet.request, epoch=0, ticket=packet.ticket, reason="link", freed=not is_source
            )
            self._reply(lost)
        return self.replies

    def leased(self) -> list[int]:
        return [number for number, entry in self.open.items() if entry.lease]

    def round(self, number: int) -> list[FromWorker]:
        """One leased round with a local drafter that is right most of the time."""
        self.replies = []
        entry = self.open.get(number)
        if entry is None or entry.lease is None:
            return []
        root = entry.tokens[-1]
        drafts = self._guess(entry, entry.lease.num_speculative_tokens)
        nodes = [Node(id=i, parent=i - 1 if i else ROOT, token=token) for i, token in enumerate(drafts)]
        if not self._fits(number, 1 + len(nodes)) or number not in self.open:
            return self.replies
        outcomes = dict(self._compute(entry, (root,), nodes))
        new, node = [], ROOT
        while True:
            new.append(outcomes[node])
            child = next((n for n in nodes if n.parent == node and n.token == outcomes[node]), None)
            if child is None:
                break
            node = child.id
        reason = None
        for i, token in enumerate(new):
            reason = finish_reason(entry.params, entry.emitted + i + 1, token)
            if reason:
                new = new[: i + 1]
                break
        kept = list(range(len(new) - 1))
        self._fates(entry, kept, [n.id for n in nodes if n.id not in kept])
        entry.tokens += new
        start, entry.emitted = entry.emitted, entry.emitted + len(new)
        self._reply(
            Progress(
                request=number,
                epoch=entry.epoch,
                start=start,
                tokens=tuple(new),
                drafted=(len(drafts),),
                accepted=(len(kept),),
                ended=reason,
            )
        )
        if reason:
            entry.lease = None
        return self.replies

    def check(self) -> None:
        """Free + cached + held = total."""
        self.books.check([entry.sequence for entry in self.open.values()])

    # -- messages ----------------------------------------------------------------------------

    def _extend(self, message: Extend) -> None:
        entry = self._entry(message, message.tokens)
        if entry is None:
            return
        self._apply_fates(entry, message.commit, message.drop)
        skip = entry.sequence.length - message.start
        cached = entry.sequence.length if message.start == 0 else 0
        if message.start and skip:
            raise Violation(f"{self.name}: extend at {message.start}, committed {entry.sequence.length}")
        tokens = message.tokens[skip:]
        if not tokens and not message.nodes:
            raise Violation(f"{self.name}: asked for nothing")
        if not self._fits(message.request, len(tokens) + len(message.nodes), message.task):
            return
        outcomes = self._compute(entry, tokens, message.nodes)
        if not tokens:
            outcomes = [(node, outcome) for node, outcome in outcomes if node != ROOT]
        self._reply(
            Verdict(
                request=message.request,
                epoch=message.epoch,
                task=message.task,
                outcomes=tuple(outcomes),
                cached=cached,
            )
        )

    def _lease(self, message: Lease) -> None:
        entry = self._entry(message, message.tokens)
        if entry is None:
            return
        self._apply_fates(entry, message.commit, message.drop)
        if entry.sequence.length != message.start:
            raise Violation(f"{self.name}: lease at {message.start}, committed {entry.sequence.length}")
        if entry.sequence.nodes:
            raise Violation(f"{self.name}: lease with live nodes {list(entry.sequence.nodes)}")
        if not message.tokens:
            raise Violation(f"{self.name}: lease without a root")
        if not self._fits(message.request, len(message.tokens)):
            return
        self._compute(entry, message.tokens[:-1], ())
        entry.lease, entry.emitted = message, message.emitted
        entry.tokens = [*entry.sequence.tokens, message.tokens[-1]]

    def _revoke(self, message: Revoke) -> None:
        entry = self.open.get(message.request)
        if entry is not None and entry.lease is not None and entry.epoch == message.epoch:
            entry.lease = None
            self._reply(
                Revoked(
                    request=message.request, epoch=message.epoch, length=entry.emitted, computed=entry.sequence.length
                )
            )

    def _drop(self, message: Drop) -> None:
        if message.request in self.open:
            self._close(message.request)
            self._reply(Freed(request=message.request, epoch=message.epoch))

    def _send_kv(self, message: SendKV) -> None:
        entry = self.open.get(message.request)
        if entry is None or entry.sequence.length < message.start + message.length:
            self._reply(
                TransferLost(
                    request=message.request, epoch=message.epoch, ticket=message.ticket, reason="not held here"
                )
            )
            return
        cells = [self.memory[self._location(entry.sequence, i)] for i in range(message.length)]
        self.packets.append((message.peer, Packet(message.request, message.ticket, cells)))

    def _receive_kv(self, message: ReceiveKV) -> None:
        self._need_slot(message.request)
        sequence = self.books.open(message.tokens, use_cache=False)
        self.arrivals += 1
        entry = Open(sequence, message.params, message.epoch, self.arrivals, awaiting=message)
        self.open[message.request] = entry
        if not self._fits(message.request, message.length):
            return
        sequence.append(message.tokens)
        early = self.early.pop(message.ticket, None)
        if early is not None:
            self._packet(early)

    def _packet(self, packet: Packet) -> None:
        """KV arrives. Without an open ticket it must not land anywhere."""
        for number, entry in self.open.items():
            if entry.awaiting is not None and entry.awaiting.ticket == packet.ticket:
                for i, cell in enumerate(packet.cells):
                    self.memory[self._location(entry.sequence, i)] = cell
                entry.awaiting = None
                self._reply(Received(request=number, epoch=entry.epoch, ticket=packet.ticket))
                return
        self.early[packet.ticket] = packet

    # -- inside ------------------------------------------------------------------------------

    def _reply(self, message: FromWorker) -> None:
        self.replies.append(message)

    def _entry(self, message: Extend | Lease, tokens: Seq[int]) -> Open | None:
        entry = self.open.get(message.request)
        if entry is not None:
            if message.epoch < entry.epoch:
                raise Violation(f"{self.name}: epoch fell from {entry.epoch} to {message.epoch}")
            if entry.awaiting is not None:
                raise Violation(f"{self.name}: work on KV that has not arrived")
            entry.epoch = message.epoch
            return entry
        if message.start:
            return None
        if message.params is None:
            raise Violation(f"{self.name}: opened without params")
        self._need_slot(message.request)
        self.arrivals += 1
        entry = Open(self.books.open(tokens), message.params, message.epoch, self.arrivals)
        self.open[message.request] = entry
        return entry

    def _need_slot(self, request: int) -> None:
        if request in self.open:
            raise Violation(f"{self.name}: request {request} opened twice")
        if len(self.open) >= self.slots:
            raise Violation(f"{self.name}: {len(self.open) + 1} requests, {self.slots} credits granted")

    def _apply_fates(self, entry: Open, commit: Seq[int], drop: Seq[int]) -> None:
        live = set(entry.sequence.nodes)
        if not set(commit) | set(drop) <= live:
            raise Violation(f"{self.name}: fates of nodes it never computed: {set(commit) | set(drop) - live}")
        self._fates(entry, commit, drop)

    def _fates(self, entry: Open, commit: Seq[int], drop: Seq[int]) -> None:
        self._move(entry.sequence, entry.sequence.commit(commit, drop))

    def _move(self, sequence: Sequence, moves: Seq[tuple[int, int]]) -> None:
        cells = [self.memory[self._location(sequence, source)] for source, _ in moves]
        for (_, to), cell in zip(moves, cells, strict=True):
            self.memory[self._location(sequence, to)] = cell

    def _fits(self, number: int, positions: int, task: int | None = None) -> bool:
        """Reserve; while pages are short, give up the newest request. False if that was this one."""
        while True:
            try:
                self.open[number].sequence.reserve(positions)
                return True
            except OutOfPages:
                victim = max(self.open, key=lambda n: self.open[n].arrival)
                epoch = self.open[victim].epoch
                self._close(victim)
                self._reply(
                    Refused(request=victim, epoch=epoch, reason="pages", task=task if victim == number else None)
                )
                if victim == number:
                    return False

    def _close(self, number: int) -> None:
        entry = self.open.pop(number)
        self.books.close(entry.sequence, keep=entry.awaiting is None)
        if self.drafter is not None:
            self.drafter.open.pop(number, None)

    def _compute(self, entry: Open, tokens: Seq[int], nodes: Seq[Node]) -> list[tuple[int, int]]:
        sequence = entry.sequence
        start = sequence.length
        for i, index in enumerate(sequence.append(tokens)):
            self.memory[self._location(sequence, index)] = (tokens[i], start + i)
        for node, index in zip(nodes, sequence.add(nodes), strict=True):
            self.memory[self._location(sequence, index)] = (node.token, sequence.position(node.id))
        if len(sequence.nodes) > self.room:
            raise Violation(f"{self.name}: {len(sequence.nodes)} live nodes, room for {self.room}")
        out = []
        if sequence.length:
            out.append((ROOT, self._outcome(entry, list(range(sequence.length)))))
        for node in nodes:
            seen = [*range(sequence.length), *sequence.ancestors(node.id)[::-1]]
            out.append((node.id, self._outcome(entry, seen)))
        return out

    def _outcome(self, entry: Open, seen: Seq[int]) -> int:
        """What the model draws after the cells it attends to, which must be one gap-free text."""
        cells = sorted((self.memory[self._location(entry.sequence, i)] for i in seen), key=lambda cell: cell[1])
        if [position for _, position in cells] != list(range(len(cells))):
            raise Violation(f"{self.name}: attends to positions {[p for _, p in cells]}")
        return self.model.outcome([token for token, _ in cells], entry.params)

    def _guess(self, entry: Open, most: int) -> list[int]:
        left = entry.params.max_tokens - entry.emitted - 1
        text, out = list(entry.tokens), []
        for _ in range(min(most, left)):
            right = self.model.outcome(text, entry.params)
            token = right if self.rng.random() < self.rounds_accept else self.rng.randrange(self.model.vocab)
            text.append(token)
            out.append(token)
        return out

    def _location(self, sequence: Sequence, index: int) -> int:
        return sequence.pages[index // self.page_size] * self.page_size + index % self.page_size
