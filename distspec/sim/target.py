"""A simulated target worker: messages in, replies out, and a queue of work between them.

As a real worker does, it answers at once what needs no forward (a dropped request, a transfer of what is
computed), and computes late and in any order what does. So a coordinator that takes work for done because it
was sent is found out. Knows messages; holds requests. Does not know the coordinator's state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from random import Random

from msgspec import structs

from distspec.errors import OutOfPages
from distspec.kv.sequence import Sequence
from distspec.protocol.codec import pack_logprobs
from distspec.protocol.messages import (
    Draft,
    Drop,
    Extend,
    Freed,
    FromWorker,
    Lease,
    Progress,
    Received,
    ReceiveKV,
    Refused,
    Revoke,
    Revoked,
    SendFeatures,
    SendKV,
    TransferLost,
    Verdict,
    Withdraw,
)
from distspec.protocol.values import ROOT, Node, SamplingParams, finish_reason
from distspec.sim.drafter import SimDrafter
from distspec.sim.memory import Memory
from distspec.sim.model import ToyModel
from distspec.sim.packet import Packet
from distspec.sim.violation import Violation

LEASED_ACCEPT = 0.7
"""How often a draft of a leased round is right."""


@dataclass(slots=True)
class Open:
    """A request that is open here. arrival: order of opening, the newest is given up first.

    inbox: messages that wait to be taken up. lease: the one that runs; todo: committed tokens that its next
    round computes, the root last. awaiting: its KV is on the way here. sends: of KV that is not computed yet.
    withdrawn: nodes that were left out.
    """

    sequence: Sequence
    params: SamplingParams
    epoch: int
    arrival: int
    inbox: deque[Extend | Lease | Revoke] = field(default_factory=deque)
    lease: Lease | None = None
    todo: tuple[int, ...] = ()
    emitted: int = 0
    awaiting: ReceiveKV | None = None
    sends: list[SendKV] = field(default_factory=list)
    withdrawn: set[int] = field(default_factory=set)


class SimTarget:
    """One target worker of any role. `handle` takes a message, `step` does one piece of work that waits; both
    return replies to send. packets: KV and features to send, by the peer's name."""

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
        max_model_len: int = 10_000,
        reads: bool = False,
    ) -> None:
        """reads: its drafter drafts from features, those that it computed itself."""
        self.name, self.model, self.rng, self.drafter, self.reads = name, model, rng, drafter, reads
        self.slots = slots
        self.memory = Memory(model, pages=pages, page_size=page_size, room=room, max_model_len=max_model_len)
        self.open: dict[int, Open] = {}
        self.arrivals = 0
        self.replies: list[FromWorker] = []
        self.packets: list[tuple[str, Packet]] = []
        self.early: dict[int, Packet] = {}

    def handle(self, message: object) -> list[FromWorker]:
        """Take one message; replies that need no work, in order."""
        self.replies = []
        match message:
            case Extend() | Lease() | Revoke():
                self._take(message)
            case Withdraw():
                self._withdraw(message)
            case Drop():
                self._drop(message)
            case SendKV() | SendFeatures():
                self._send(message)
            case ReceiveKV():
                self._receive_kv(message)
            case Packet():
                self._packet(message)
            case Draft() if self.drafter is not None:
                if message.request in self.open:  # else it was given up, and that was said
                    self.replies += self.drafter.handle(message)
                    if self.reads and not message.shape.quick:
                        self._check_features(message.request)
            case _:
                raise Violation(f"{self.name} got {type(message).__name__}")
        return self.replies

    def ready(self) -> bool:
        """There is work to do."""
        return bool(self._waiting()) or (self.drafter is not None and self.drafter.ready())

    def step(self) -> list[FromWorker]:
        """One piece of work of any request: its oldest message, or a round of its lease."""
        self.replies = []
        waiting = self._waiting()
        if self.drafter is not None and self.drafter.ready() and not (waiting and self.rng.random() < 0.5):
            return self.drafter.step()
        if waiting:
            entry = self.open[self.rng.choice(waiting)]
            if not entry.inbox:
                self._round(entry)
            else:
                match entry.inbox.popleft():
                    case Extend() as message:
                        self._extend(entry, message)
                    case Lease() as message:
                        self._lease(entry, message)
                    case Revoke() as message:
                        self._revoke(entry, message)
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

    def check(self) -> None:
        """Free + cached + held = total."""
        self.memory.books.check([entry.sequence for entry in self.open.values()])

    # -- messages, answered at once ------------------------------------------------------------

    def _take(self, message: Extend | Lease | Revoke) -> None:
        entry = self.open.get(message.request)
        if entry is None:
            if isinstance(message, Revoke) or message.start:
                return  # it was given up, and that was said
            if message.params is None:
                raise Violation(f"{self.name}: opened without params")
            entry = self._open(message.request, message.epoch, message.tokens, message.params)
        if message.epoch < entry.epoch:
            raise Violation(f"{self.name}: epoch fell from {entry.epoch} to {message.epoch}")
        if entry.awaiting is not None:
            raise Violation(f"{self.name}: work on KV that has not arrived")
        entry.epoch = message.epoch
        entry.inbox.append(message)

    def _withdraw(self, message: Withdraw) -> None:
        """Leave out the nodes of work that waits."""
        entry = self.open.get(message.request)
        if entry is None:
            return
        for i, work in enumerate(entry.inbox):
            if isinstance(work, Extend) and work.task in message.tasks:
                entry.withdrawn.update(node.id for node in work.nodes)
                entry.inbox[i] = structs.replace(work, nodes=())

    def _drop(self, message: Drop) -> None:
        if message.request in self.open:
            self._close(message.request)
            self._reply(Freed(request=message.request, epoch=message.epoch))

    def _send(self, message: SendKV | SendFeatures) -> None:
        """Send what is computed by now, whatever waits in the inbox; or what that will compute, once it has."""
        entry = self.open.get(message.request)
        if entry is None:
            lost = TransferLost(request=message.request, epoch=message.epoch, ticket=message.ticket, reason="gone")
            self._reply(lost)
            return
        if entry.awaiting is not None:
            raise Violation(f"{self.name}: to send what has not arrived")
        if isinstance(message, SendFeatures):
            cells = self.memory.features(entry.sequence, message.start, message.length, message.nodes)
        elif 0 < message.length <= entry.sequence.length:
            cells = self.memory.read(entry.sequence, message.length)
        elif any(isinstance(work, Extend) and work.start + len(work.tokens) >= message.length for work in entry.inbox):
            entry.sends.append(message)
            return
        else:
            raise Violation(f"{self.name}: KV of {message.length} tokens wanted, {entry.sequence.length} computed")
        self.packets.append((message.peer, Packet(message.request, message.ticket, cells)))

    def _receive_kv(self, message: ReceiveKV) -> None:
        entry = self._open(message.request, message.epoch, message.tokens, message.params, use_cache=False)
        entry.awaiting = message
        if not self._fits(entry, message.length):
            return
        entry.sequence.append(message.tokens)
        early = self.early.pop(message.ticket, None)
        if early is not None:
            self._packet(early)

    def _packet(self, packet: Packet) -> None:
        """KV arrives. Without an open ticket it must not land anywhere."""
        entry = self.open.get(packet.request)
        if entry is None or entry.awaiting is None or entry.awaiting.ticket != packet.ticket:
            self.early[packet.ticket] = packet
            return
        if not packet.cells:
            self.replies += self.lose(packet, is_source=False)
            return
        self.memory.load(entry.sequence, packet.cells)
        entry.awaiting = None
        self._reply(Received(request=packet.request, epoch=entry.epoch, ticket=packet.ticket))

    # -- work, done late -----------------------------------------------------------------------

    def _waiting(self) -> list[int]:
        return [number for number, entry in self.open.items() if entry.inbox or entry.lease]

    def _extend(self, entry: Open, message: Extend) -> None:
        tokens = self._begin(entry, message)
        if not tokens and not message.nodes and not entry.withdrawn:
            raise Violation(f"{self.name}: asked for nothing")
        cached = len(message.tokens) - len(tokens)
        if not self._fits(entry, len(tokens) + len(message.nodes), message):
            return
        judged = self.memory.compute(entry.sequence, tokens, message.nodes, entry.params)
        sends, entry.sends = entry.sends, []
        for send in sends:
            self._send(send)
        asks = entry.params.logprobs is not None
        self._reply(
            Verdict(
                request=message.request,
                epoch=message.epoch,
                task=message.task,
                outcomes=tuple((node, token) for node, token, _ in judged),
                cached=cached,
                logprobs=tuple(said for _, _, said in judged) if asks else (),
                prompt_logprobs=self._prompt_logprobs(entry, message),
            )
        )

    def _prompt_logprobs(self, entry: Open, message: Extend) -> bytes:
        text, params = message.tokens, entry.params
        if params.prompt_logprobs is None or message.start or len(text) != params.prompt_tokens:
            return b""
        return pack_logprobs([self.model.logprobs(text[:end], params) for end in range(1, len(text))])

    def _lease(self, entry: Open, message: Lease) -> None:
        """The lease runs; its first round computes what it brought."""
        entry.todo = self._begin(entry, message)
        if entry.sequence.nodes:
            raise Violation(f"{self.name}: lease with live nodes {list(entry.sequence.nodes)}")
        if not entry.todo:
            raise Violation(f"{self.name}: lease without a root")
        entry.lease, entry.emitted = message, message.emitted

    def _begin(self, entry: Open, message: Extend | Lease) -> tuple[int, ...]:
        """Apply what was decided about nodes; the tokens that are left to compute."""
        sequence = entry.sequence
        if entry.lease is not None:
            raise Violation(f"{self.name}: work of a leased request")
        drop = set(message.drop) - entry.withdrawn
        entry.withdrawn.difference_update(message.drop)
        unknown = {*message.commit, *drop} - set(sequence.nodes)
        if unknown:
            raise Violation(f"{self.name}: fates of nodes it never computed: {unknown}")
        self.memory.decide(sequence, message.commit, drop)
        if message.start and sequence.length != message.start:
            raise Violation(f"{self.name}: work at {message.start}, committed {sequence.length}")
        return message.tokens[sequence.length - message.start :]

    def _revoke(self, entry: Open, message: Revoke) -> None:
        entry.lease = None
        computed = entry.sequence.length
        self._reply(Revoked(request=message.request, epoch=message.epoch, length=entry.emitted, computed=computed))

    def _check_features(self, request: int) -> None:
        """Prove that every position of its drafter's text but the last was computed here."""
        assert self.drafter is not None
        text, sequence = self.drafter.open[request].tokens, self.open[request].sequence
        known = sequence.length + len(sequence.spell(text[sequence.length : -1]))
        if known < len(text) - 1:
            raise Violation(f"{self.name}: features of {known} positions for a text of {len(text)} tokens")

    def _round(self, entry: Open) -> None:
        """One leased round, with a local drafter that is right most of the time."""
        assert entry.lease is not None
        drafts = self._guess(entry, entry.lease.nodes if entry.lease.shape is not None else 0)
        nodes = [Node(id=i, parent=i - 1 if i else ROOT, token=token) for i, token in enumerate(drafts)]
        if not self._fits(entry, len(entry.todo) + len(nodes)):
            return
        judged = self.memory.compute(entry.sequence, entry.todo, nodes, entry.params)
        outcomes = {node: token for node, token, _ in judged}
        new, reason = [outcomes[ROOT]], finish_reason(entry.params, entry.emitted + 1, outcomes[ROOT])
        while reason is None and len(new) <= len(drafts) and drafts[len(new) - 1] == new[-1]:
            new.append(outcomes[len(new) - 1])
            reason = finish_reason(entry.params, entry.emitted + len(new), new[-1])
        kept = len(new) - 1
        self.memory.decide(entry.sequence, range(kept), range(kept, len(nodes)))
        start, entry.emitted = entry.emitted, entry.emitted + len(new)
        entry.todo = (new[-1],)
        self._reply(
            Progress(
                request=entry.lease.request,
                epoch=entry.epoch,
                start=start,
                tokens=tuple(new),
                drafted=(len(drafts),),
                accepted=(kept,),
                ended=reason,
                logprobs=tuple(said for _, _, said in judged[: len(new)]) if entry.params.logprobs is not None else (),
            )
        )
        if reason:
            entry.lease = None

    def _guess(self, entry: Open, most: int) -> list[int]:
        text = [*entry.sequence.tokens, *entry.todo]
        out: list[int] = []
        for _ in range(min(most, entry.params.max_tokens - entry.emitted - 1)):
            right = self.model.outcome(text + out, entry.params)
            out.append(right if self.rng.random() < LEASED_ACCEPT else self.rng.randrange(self.model.vocab))
        return out

    # -- opening and closing -------------------------------------------------------------------

    def _reply(self, message: FromWorker) -> None:
        self.replies.append(message)

    def _open(self, request: int, epoch: int, tokens: Seq[int], params: SamplingParams, use_cache: bool = True) -> Open:
        if request in self.open:
            raise Violation(f"{self.name}: request {request} opened twice")
        if len(self.open) >= self.slots:
            raise Violation(f"{self.name}: {len(self.open) + 1} requests, {self.slots} credits granted")
        self.arrivals += 1
        sequence = self.memory.books.open(tokens, use_cache=use_cache)
        entry = self.open[request] = Open(sequence, params, epoch, self.arrivals)
        return entry

    def _fits(self, entry: Open, positions: int, message: Extend | None = None) -> bool:
        """Reserve; while pages are short, give up the newest request. False if that was this one."""
        while True:
            try:
                entry.sequence.reserve(positions)
                return True
            except OutOfPages:
                number = max(self.open, key=lambda n: self.open[n].arrival)
                victim = self.open[number]
                self._close(number)
                task = message.task if message is not None and victim is entry else None
                self._reply(Refused(request=number, epoch=victim.epoch, reason="pages", task=task))
                if victim is entry:
                    return False

    def _close(self, number: int) -> None:
        entry = self.open.pop(number)
        self.packets += [(send.peer, Packet(send.request, send.ticket, [])) for send in entry.sends]
        self.memory.books.close(entry.sequence, keep=entry.awaiting is None)
        if self.drafter is not None:
            self.drafter.forget(number)
