"""Workers whose steps take the time of a curve: they keep lengths and trees, and no pages.

A step takes up what is ready when it begins and answers when it ends. Knows messages, and the synthetic target and
drafter. Does not know the coordinator's state, nor what time it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from distspec import synthetic
from distspec.muster import Muster
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
    Revoke,
    Revoked,
    SendKV,
    Verdict,
    Withdraw,
)
from distspec.protocol.values import ROOT, SamplingParams, Shape, finish_reason
from distspec.sim.sapling import Sapling
from distspec.sim.violation import Violation


@dataclass(frozen=True, slots=True)
class SyntheticModel:
    """odds: how often the drafter's first, second... guess is right."""

    vocab: int
    odds: tuple[float, ...]

    def outcome(self, params: SamplingParams, position: int, last: int) -> int:
        """The token after `last`, which stands at `position`."""
        return synthetic.outcome(params.seed, params.choice, position + 1, last, self.vocab)

    def guesses(self, params: SamplingParams, position: int, last: int, topk: int) -> list[int]:
        return synthetic.guesses(params.seed, params.choice, position + 1, last, self.vocab, self.odds, topk)


# -- target ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Open:
    """A request on a target: its committed text by length and last token, its nodes as (position, token)."""

    params: SamplingParams
    length: int = 0
    last: int = -1
    nodes: dict[int, tuple[int, int]] = field(default_factory=dict)
    withdrawn: set[int] = field(default_factory=set)
    works: deque[Extend] = field(default_factory=deque)
    lease: Lease | None = None
    revoke: Revoke | None = None
    emitted: int = 0
    awaiting: int | None = None
    sends: list[SendKV] = field(default_factory=list)


class TimedTarget:
    """Continuous batching: a step takes the oldest work of every request that has one, and a round of every lease.

    packets: KV to send, as (peer, request, ticket). rows: computed so far; nodes: those of drafted tokens.
    """

    def __init__(self, name: str, model: SyntheticModel) -> None:
        self.name, self.model = name, model
        self.open: dict[int, _Open] = {}
        self.packets: list[tuple[str, int, int]] = []
        self.early: set[int] = set()
        self.nodes = 0
        self.muster = Muster()

    def handle(self, message: object, now_s: float) -> list[FromWorker]:
        """Take one message; replies that need no step."""
        match message:
            case Extend() | Lease():
                self._take(message)
                self.muster.returned(message.request, now_s)
            case Withdraw():
                self._withdraw(message)
            case Drop():
                self.muster.left(message.request)
                if self.open.pop(message.request, None) is not None:
                    return [Freed(request=message.request, epoch=message.epoch)]
            case Revoke():
                self.open[message.request].revoke = message
            case SendKV():
                entry = self.open[message.request]
                if message.length > entry.length + sum(len(work.tokens) for work in entry.works):
                    raise Violation(f"{self.name}: KV of {message.length} tokens wanted that nobody asked for")
                entry.sends.append(message)
                self._send(entry)
            case ReceiveKV():
                entry = self.open[message.request] = _Open(message.params, message.length, message.tokens[-1])
                entry.awaiting = message.ticket
                return self._arrived(message.request) if message.ticket in self.early else []
            case _:
                raise Violation(f"{self.name} got {type(message).__name__}")
        return []

    def received(self, request: int, ticket: int) -> list[FromWorker]:
        """KV is here, perhaps before anybody said that it would come."""
        self.early.add(ticket)
        entry = self.open.get(request)
        return self._arrived(request) if entry is not None and entry.awaiting == ticket else []

    def hold_s(self, now_s: float) -> float:
        """How much longer the next step waits for more."""
        ready = [entry for entry in self.open.values() if entry.works or entry.lease or entry.revoke]
        if any(entry.revoke for entry in ready):
            return 0.0
        rows = sum(len(e.works[0].tokens) + len(e.works[0].nodes) if e.works else 1 for e in ready)
        return self.muster.wait_s(len(ready), rows, now_s)

    def begin(self) -> tuple[int, list[FromWorker]]:
        """Take up what is ready: rows of the step (0: nothing is), and what is to be said when it ends."""
        rows, replies = 0, list[FromWorker]()
        for entry in list(self.open.values()):
            if entry.revoke is not None:
                replies.append(self._revoked(entry, entry.revoke))
            if entry.works:
                work = entry.works.popleft()
                verdict = self._judge(entry, work)
                rows += len(work.tokens) + len(work.nodes)
                self.nodes += len(work.nodes)
                replies.append(verdict)
            elif entry.lease is not None:
                rows += 1
                replies.append(self._round(entry, entry.lease))
        return rows, replies

    def ended(self, rows: int, took_s: float, replies: list[FromWorker], now_s: float) -> None:
        """The step that `begin` began is over."""
        self.muster.stepped(rows, took_s)
        for reply in replies:
            entry = self.open.get(reply.request) if isinstance(reply, Verdict) else None
            if entry is not None:
                self._send(entry)
            if isinstance(reply, Verdict) and entry is not None and not entry.works and entry.lease is None:
                self.muster.answered(reply.request, len(reply.outcomes), now_s)

    def _take(self, message: Extend | Lease) -> None:
        entry = self.open.get(message.request)
        if entry is None:
            if message.params is None or message.start:
                raise Violation(f"{self.name}: request {message.request} is not open")
            entry = self.open[message.request] = _Open(message.params)
        if entry.awaiting is not None:
            raise Violation(f"{self.name}: work on KV that has not arrived")
        if isinstance(message, Extend):
            entry.works.append(message)
            return
        if message.shape is not None:
            raise Violation(f"{self.name} has no drafter of its own")
        self._append(entry, message.start, message.tokens, message.commit)
        entry.lease, entry.emitted = message, message.emitted

    def _withdraw(self, message: Withdraw) -> None:
        """Leave out the nodes of work that waits."""
        entry = self.open[message.request]
        for i, work in enumerate(entry.works):
            if work.task in message.tasks:
                entry.withdrawn.update(node.id for node in work.nodes)
                entry.works[i] = structs.replace(work, nodes=())

    def _send(self, entry: _Open) -> None:
        """What is computed of the KV that is to be sent. It crosses while the rest is computed: its last positions are
        there a hop after their step."""
        for message in [message for message in entry.sends if message.length <= entry.length]:
            entry.sends.remove(message)
            self.packets.append((message.peer, message.request, message.ticket))

    def _arrived(self, request: int) -> list[FromWorker]:
        entry = self.open[request]
        ticket, entry.awaiting = entry.awaiting, None
        assert ticket is not None
        self.early.discard(ticket)
        return [Received(request=request, epoch=0, ticket=ticket)]

    def _append(self, entry: _Open, start: int, tokens: Sequence[int], commit: Sequence[int]) -> None:
        for node in commit:
            _, entry.last = entry.nodes.pop(node)
            entry.length += 1
        if entry.length != start:
            raise Violation(f"{self.name}: work at {start}, committed {entry.length}")
        entry.length += len(tokens)
        entry.last = tokens[-1] if tokens else entry.last

    def _judge(self, entry: _Open, work: Extend) -> Verdict:
        self._append(entry, work.start, work.tokens, work.commit)
        for node in work.drop:
            if node not in entry.withdrawn:
                del entry.nodes[node]
            entry.withdrawn.discard(node)
        outcomes = []
        if work.tokens:
            outcomes.append((ROOT, self.model.outcome(entry.params, entry.length - 1, entry.last)))
        for one in work.nodes:
            position = entry.length if one.parent == ROOT else entry.nodes[one.parent][0] + 1
            entry.nodes[one.id] = position, one.token
            outcomes.append((one.id, self.model.outcome(entry.params, position, one.token)))
        return Verdict(request=work.request, epoch=work.epoch, task=work.task, outcomes=tuple(outcomes))

    def _revoked(self, entry: _Open, message: Revoke) -> Revoked:
        """Between two steps, so behind what the last one said. What a lease drew last is not computed yet."""
        entry.length -= entry.lease is not None
        entry.lease = entry.revoke = None
        return Revoked(request=message.request, epoch=message.epoch, length=entry.emitted, computed=entry.length)

    def _round(self, entry: _Open, lease: Lease) -> Progress:
        """One token of plain decoding."""
        token = self.model.outcome(entry.params, entry.length - 1, entry.last)
        start, entry.emitted = entry.emitted, entry.emitted + 1
        entry.length, entry.last = entry.length + 1, token
        ended = finish_reason(entry.params, entry.emitted, token)
        if ended:
            entry.lease = None
        return Progress(
            request=lease.request,
            epoch=lease.epoch,
            start=start,
            tokens=(token,),
            drafted=(0,),
            accepted=(0,),
            ended=ended,
        )


# -- drafter ---------------------------------------------------------------------------------------


class TimedDrafter:
    """Slices: a step expands the frontier of every request that waits; those whose steps are done are answered."""

    def __init__(self, name: str, model: SyntheticModel) -> None:
        self.name, self.model = name, model
        self.open: dict[int, tuple[SamplingParams, Sapling]] = {}
        self.inbox: list[Draft | Drop] = []
        self.waiting: dict[int, tuple[Draft, int]] = {}

    def handle(self, message: object, now_s: float) -> list[FromWorker]:
        if not isinstance(message, Draft | Drop):
            raise Violation(f"{self.name} got {type(message).__name__}")
        self.inbox.append(message)
        return []

    def hold_s(self, now_s: float) -> float:
        """Its steps are short, and wait for nobody."""
        return 0.0

    def ended(self, rows: int, took_s: float, replies: list[FromWorker], now_s: float) -> None:
        pass

    def begin(self) -> tuple[int, list[FromWorker]]:
        """As TimedTarget.begin. New drafts are taken up between steps, a request's last one counts."""
        replies = list[FromWorker]()
        for message in self.inbox:
            if isinstance(message, Draft):
                self._take(message)
            elif self.open.pop(message.request, None) is not None:
                self.waiting.pop(message.request, None)
                replies.append(Freed(request=message.request, epoch=message.epoch))
        self.inbox.clear()
        rows, waiting = 0, self.waiting
        self.waiting = {}
        for number, (message, left) in waiting.items():
            new = self._grow(number, message.shape)
            rows += new
            if left > 1 and new:
                self.waiting[number] = message, left - 1
            else:
                replies.append(self.open[number][1].drafted(message))
        return rows, replies

    def _take(self, message: Draft) -> None:
        if message.request not in self.open:
            if message.params is None:
                raise Violation(f"{self.name}: request {message.request} is not open")
            self.open[message.request] = message.params, Sapling()
        sapling = self.open[message.request][1]
        if sapling.nodes[sapling.root].position + 1 != message.keep:
            raise Violation(f"{self.name}: told to keep {message.keep} tokens")
        for token in message.tokens:
            sapling.append(token)
        self.waiting.pop(message.request, None)
        self.waiting[message.request] = message, message.shape.steps

    def _grow(self, number: int, shape: Shape) -> int:
        """One step of one tree; how many nodes were expanded."""
        params, sapling = self.open[number]
        chosen = sapling.frontier(shape)
        for id in chosen:
            node = sapling.nodes[id]
            tokens = self.model.guesses(params, node.position, node.token, shape.topk)
            sapling.expand(id, tokens, shape, self.model.odds)
        return len(chosen)
