"""The coordinator's heart: events in, commands out; no socket, no clock, no tensor.

`handle(event, now)` is the only way in. It alone changes requests; what it returns is to be sent in order.
An event that names something gone (an old incarnation, a finished request, a void future) changes nothing
but the credits that it returns: this is the one place where stale messages are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import structs

from distspec.coordinator import answers, choosing, driving, events, feeding, lifecycle
from distspec.coordinator.context import Context, Settings
from distspec.coordinator.events import Command, Event
from distspec.coordinator.notes import Note
from distspec.coordinator.request import Request, State
from distspec.errors import InvalidField, Overloaded, RequestError, Unavailable
from distspec.protocol.messages import (
    Cancel,
    Drafted,
    Fault,
    Freed,
    Progress,
    Received,
    Refused,
    Revoked,
    Submit,
    TransferLost,
    Verdict,
)

_Stepped = Verdict | Progress | Drafted
"""What says how long a step took."""


class Machine:
    """The state of one coordinator life. term grows with every life of the coordinator of a fleet."""

    def __init__(self, settings: Settings, term: int) -> None:
        self._ctx = Context(settings, term)
        self._events: dict[type, Callable[[Any], None]] = {
            events.WorkerJoined: self._worker_joined,
            events.WorkerLeft: self._worker_left,
            events.ClientLeft: self._client_left,
            events.FromWorker: self._from_worker,
            events.FromClient: self._from_client,
            events.Tick: self._tick,
            events.Drain: self._drain,
            events.Thought: self._thought,
        }
        self._messages: dict[type, Callable[[Request, str, Any], None]] = {
            Verdict: self._verdict,
            Drafted: self._drafted,
            Progress: self._progress,
            Revoked: self._revoked,
            Received: self._received,
            TransferLost: self._transfer_lost,
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event at time `now` (seconds, never falling). Returns what to send, in order."""
        ctx = self._ctx
        ctx.now, ctx.out, ctx.notes = now, [], []
        self._events[type(event)](event)
        lifecycle.admit(ctx)
        return ctx.out

    @property
    def has_thoughts(self) -> bool:
        """Whether something is to be worked out, by a `Thought` whenever nobody waits."""
        return self._ctx.planner.is_valuing

    @property
    def notes(self) -> Sequence[Note]:
        """What the last event did that its commands do not say."""
        return self._ctx.notes

    def request(self, number: int) -> Request | None:
        """A live request, to look at."""
        return self._ctx.requests.get(number)

    def knows(self, client: str, key: str) -> bool:
        """Whether this client has a live request of that key."""
        return (client, key) in self._ctx.keys

    def snapshot(self) -> dict[str, Any]:
        """What `distspec status` and the metrics show: plain values."""
        ctx = self._ctx
        return {
            "term": ctx.term,
            "queued": len(ctx.queue),
            "acceptance": ctx.acceptance,
            "counters": dict(ctx.counters),
            "workers": {
                name: {"role": w.hello.role, "open": w.out, "slots": w.hello.slots, "node": w.hello.node}
                for name, w in ctx.credits.workers.items()
            },
            "requests": {
                number: {
                    "state": request.state.value,
                    "policy": request.policy,
                    "tokens": len(request.tokens),
                    "emitted": request.emitted,
                    "workers": sorted(request.holds),
                }
                for number, request in ctx.requests.items()
            },
        }

    # -- clients -----------------------------------------------------------------------------

    def _from_client(self, event: events.FromClient) -> None:
        if isinstance(event.message, Cancel):
            self._cancel(event.client, event.message.key)
            return
        try:
            self._submit(event.client, event.message)
        except RequestError as error:
            self._ctx.refuse(event.client, event.message.key, error, len(event.message.emitted))

    def _submit(self, client: str, message: Submit) -> None:
        ctx, choice = self._ctx, message.speculation
        policy = choice.policy or ctx.settings.policy
        if policy not in ctx.settings.allowed_policies:
            raise InvalidField("speculation.policy", policy, f"one of {', '.join(ctx.settings.allowed_policies)}")
        wide = choice.num_speculative_tokens
        if wide is not None and not 1 <= wide <= ctx.settings.room:
            raise InvalidField("speculation.num_speculative_tokens", wide, f"1 to {ctx.settings.room}")
        if (client, message.key) in ctx.keys:
            raise InvalidField("key", message.key, "a key that is not in use")
        if not message.prompt:
            raise InvalidField("prompt", "no tokens", "at least one token")
        if message.params.max_tokens < 1:
            raise InvalidField("max_tokens", message.params.max_tokens, "at least 1")
        if len(ctx.queue) >= ctx.settings.max_queued_requests and not message.emitted:
            raise Overloaded(f"{len(ctx.queue)} requests are waiting")
        if self._is_deserted():
            raise Unavailable("no decode worker is alive")
        limits = ctx.credits.limits(ctx.settings.room)
        params = structs.replace(message.params, prompt_tokens=len(message.prompt))
        if limits is not None:
            params = limits.fit(message.prompt, params)
        request = Request(
            ctx.number(), client, message.key, message.prompt, message.emitted, params, policy, wide, ctx.now
        )
        request.fits = limits is not None
        ctx.counters["requests"] += 1
        ctx.requests[request.number] = request
        ctx.keys[client, message.key] = request.number
        ctx.enqueue(request)
        lifecycle.complete(ctx, request)

    def _is_deserted(self) -> bool:
        """No decode worker now, nor for some time: waiting would be a promise nobody keeps."""
        ctx = self._ctx
        if ctx.credits.role("decode"):
            ctx.decoder_seen_s = ctx.now
        if ctx.decoder_seen_s is None:
            ctx.decoder_seen_s = ctx.now
        return ctx.now - ctx.decoder_seen_s > ctx.settings.unavailable_s

    def _cancel(self, client: str, key: str) -> None:
        number = self._ctx.keys.get((client, key))
        if number is not None:
            request = self._ctx.requests[number]
            self._ctx.emit(request, request.emitted, "abort")
            self._ctx.forget(request)

    def _client_left(self, event: events.ClientLeft) -> None:
        for client, key in list(self._ctx.keys):
            if client == event.client:
                self._cancel(client, key)

    # -- workers come and go -------------------------------------------------------------------

    def _worker_joined(self, event: events.WorkerJoined) -> None:
        hello = event.hello
        if hello.worker in self._ctx.credits.workers:
            self._lose(hello.worker)
        self._ctx.credits.join(hello)
        self._ctx.planner.joined(hello)
        self._ctx.heard[hello.worker] = self._ctx.now
        for request in self._ctx.requests.values():
            request.avoid.discard(hello.worker)
        lifecycle.fit(self._ctx)

    def _worker_left(self, event: events.WorkerLeft) -> None:
        known = self._ctx.credits.workers.get(event.worker)
        if known is not None and known.hello.incarnation == event.incarnation:
            self._lose(event.worker)

    def _lose(self, worker: str) -> None:
        self._ctx.credits.leave(worker)
        self._ctx.counters["workers_lost"] += 1
        for request in list(self._ctx.requests.values()):
            drafter = request.drafting.worker if request.drafting else None
            sources = {hold.source for hold in request.holds.values()}
            if worker in request.holds or worker == drafter or worker in sources:
                lifecycle.lost_worker(self._ctx, request, worker)
                self._settle(request)

    def _drain(self, event: events.Drain) -> None:
        ctx = self._ctx
        if event.worker not in ctx.credits.workers:
            return
        ctx.credits.workers[event.worker].draining = True
        for request in list(ctx.requests.values()):
            if request.drafting and request.drafting.worker == event.worker:
                ctx.detach_drafter(request)
            if event.worker in (request.home, request.prefiller) and event.worker in request.holds:
                ctx.requeue(request)
            elif event.worker in request.holds:
                ctx.close(request, event.worker)
            if request.state is State.DRIVEN:
                driving.drive(ctx, request)
                self._settle(request)

    # -- messages of workers --------------------------------------------------------------------

    def _from_worker(self, event: events.FromWorker) -> None:
        ctx, message = self._ctx, event.message
        worker = ctx.credits.workers.get(event.worker)
        if worker is None or worker.hello.incarnation != event.incarnation:
            return
        ctx.heard[event.worker] = ctx.now
        if isinstance(message, Fault):
            ctx.counters["faults"] += 1
            return
        if isinstance(message, _Stepped):
            ctx.planner.stepped(event.worker, isinstance(message, Drafted), message.step, message.span[1])
        request = ctx.requests.get(message.request)
        if isinstance(message, Freed):
            ctx.credits.give_back(event.worker)
            return
        if isinstance(message, Refused):
            ctx.credits.give_back(event.worker)
            if request is not None and self._is_opening(request, event.worker, message.epoch):
                lifecycle.refused(ctx, request, event.worker, message.reason)
                self._settle(request)
            return
        if isinstance(message, TransferLost) and message.freed:
            ctx.credits.give_back(event.worker)
        if request is not None:
            self._messages[type(message)](request, event.worker, message)
            self._settle(request)

    def _is_opening(self, request: Request, worker: str, epoch: int) -> bool:
        """Whether a refusal speaks of what is open there now, not of an opening that was dropped since."""
        hold, draft = request.holds.get(worker), request.drafting
        if hold is not None:
            return hold.opened and epoch >= hold.epoch
        return draft is not None and draft.worker == worker and epoch >= draft.epoch

    def _is_of_now(self, request: Request, worker: str, message: Progress | Revoked) -> bool:
        """Whether this lease is the one that stands: every lease has an epoch of its own."""
        return message.epoch == request.epoch and worker == request.home

    def _verdict(self, request: Request, worker: str, message: Verdict) -> None:
        task = request.tasks.get(message.task)
        if task is not None and request.state is State.DRIVEN:
            self._ctx.planner.turned(self._ctx.now - task.sent_s, message.span)
        if not answers.verdict(request, message):
            return
        if request.state is State.PREFILL:
            request.tally.cached = max(request.tally.cached, min(message.cached, request.prompt_length))
            if not driving.advance(self._ctx, request):
                lifecycle.prefilled(self._ctx, request)
        elif request.state is State.DRIVEN:
            driving.drive(self._ctx, request)

    def _drafted(self, request: Request, worker: str, message: Drafted) -> None:
        ctx = self._ctx
        if request.state is not State.DRIVEN:
            return
        asked = request.drafting
        if asked is not None and asked.task == message.task:
            ctx.planner.turned(ctx.now - asked.sent_s, message.span)
        if answers.drafted(ctx, request, worker, message):
            driving.drive(ctx, request)
        if ctx.credits.workers[worker].barred:
            self._cut_off(worker)

    def _cut_off(self, drafter: str) -> None:
        """Take the requests of a drafter that answers nonsense away from it."""
        for request in list(self._ctx.requests.values()):
            if request.drafting is not None and request.drafting.worker == drafter:
                self._ctx.detach_drafter(request)
                if request.state is State.DRIVEN:
                    driving.drive(self._ctx, request)
                    self._settle(request)

    def _progress(self, request: Request, worker: str, message: Progress) -> None:
        if request.state in (State.LEASED, State.REVOKING) and self._is_of_now(request, worker, message):
            lifecycle.progress(self._ctx, request, message)

    def _revoked(self, request: Request, worker: str, message: Revoked) -> None:
        if request.state is not State.REVOKING or not self._is_of_now(request, worker, message):
            return
        if message.length != request.emitted:
            self._ctx.suspect(worker, f"lease ended at {message.length}, progress at {request.emitted}")
            return
        request.holds[worker].computed = message.computed
        lifecycle.decode(self._ctx, request)

    def _received(self, request: Request, worker: str, message: Received) -> None:
        hold = request.holds.get(worker)
        if hold is not None and hold.ticket == message.ticket:
            lifecycle.received(self._ctx, request, worker)

    def _transfer_lost(self, request: Request, worker: str, message: TransferLost) -> None:
        """Of the receiver, which has freed the request, or of the sender, whose receiver is then dropped. Features cost
        nobody the request: they are sent again."""
        ctx = self._ctx
        if feeding.lost(ctx, request, message.ticket):
            if request.state is State.DRIVEN:
                driving.drive(ctx, request)
            return
        for name, hold in list(request.holds.items()):
            if hold.ticket == message.ticket:
                if message.freed:
                    ctx.lose(request, name)
                else:
                    ctx.close(request, name)
                lifecycle.lost_ticket(ctx, request, name)

    def _settle(self, request: Request) -> None:
        """Lease a driven request that wants it, once nothing of it is in flight at home; give others the verifiers that
        their policy wants, when that has changed."""
        if request.state is not State.DRIVEN:
            return
        if not request.tasks and choosing.wants_lease(self._ctx, request):
            lifecycle.lease(self._ctx, request)
        elif request.bound_for != request.acting:
            lifecycle.bind_verifiers(self._ctx, request)

    # -- time ------------------------------------------------------------------------------------

    def _thought(self, event: events.Thought) -> None:
        self._ctx.planner.think(event.pieces)

    def _tick(self, event: events.Tick) -> None:
        ctx = self._ctx
        for request in list(ctx.requests.values()):
            if request.state is State.LEASED:
                changed = choosing.tune(ctx, request)
                leasing = choosing.wants_lease(ctx, request)
                if not leasing:
                    choosing.attach(ctx, request)  # first, so that no two leases are revoked for one drafter's credit
                if changed or not leasing:
                    lifecycle.revoke(ctx, request)
            elif request.state is State.DRIVEN:
                lifecycle.bind_verifiers(ctx, request)
        for worker, since in self._waiting().items():
            if ctx.now - max(since, ctx.heard[worker]) > ctx.settings.task_timeout_s:
                ctx.suspect(worker, f"no answer for {ctx.settings.task_timeout_s:g} s")
                ctx.heard[worker] = ctx.now
        if self._is_deserted():
            for number in list(ctx.queue):
                request = ctx.requests[number]
                ctx.refuse(request.client, request.key, Unavailable("no decode worker is alive"), request.emitted)
                ctx.forget(request)

    def _waiting(self) -> dict[str, float]:
        """Workers that owe an answer, and since when the oldest is owed."""
        since: dict[str, float] = {}

        def owes(worker: str | None, sent_s: float) -> None:
            if worker in self._ctx.credits.workers:
                since[worker] = min(sent_s, since.get(worker, sent_s))

        for request in self._ctx.requests.values():
            for task in request.tasks.values():
                owes(task.worker, task.sent_s)
            if request.drafting and request.drafting.task is not None:
                owes(request.drafting.worker, request.drafting.sent_s)
            for name, hold in request.holds.items():
                if hold.ticket is not None and request.state is not State.PREFILL:  # until then, the prefiller owes
                    owes(name, hold.sent_s)
            if request.state in (State.LEASED, State.REVOKING):
                owes(request.home, request.leased_s)
        return since
