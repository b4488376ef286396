"""A request's way: queue, prefill, transfer, then a lease or driven futures, then its one terminal message.

Each function handles one turn of that way and leaves the books whole. What a request is to do is in
`choosing`, how its futures are driven in `driving`.
"""

from __future__ import annotations

from distspec.coordinator import choosing, driving
from distspec.coordinator.context import Context
from distspec.coordinator.request import Request, State
from distspec.errors import InvalidField, RequestError, Unavailable
from distspec.protocol.messages import Extend, Lease, Progress, ReceiveKV, Revoke, SendKV
from distspec.protocol.values import finish_reason
from distspec.speculation.policies import EAGER

MAX_REFUSALS = 100
"""Times a request may be given up by workers without one new token, before it ends in an error."""

LAG = 64
"""Tokens that a verifier may lack of what home holds. Many more would be computed in one step, for which every request
there waits; their KV is sent instead, and until then takes no memory."""


def admit(ctx: Context) -> None:
    """Give queued requests to workers, oldest first, as far as credits and room go."""
    while ctx.queue:
        request = ctx.requests[ctx.queue[0]]
        decoders, prefillers = ctx.credits.role("decode"), ctx.credits.role("prefill")
        home = ctx.credits.choose(decoders, request.tokens)
        remote = bool(prefillers) and not request.prefills_at_home
        prefiller = ctx.credits.choose(prefillers, request.tokens) if remote else home
        if home is None or prefiller is None:
            return
        ctx.queue.pop(0)
        request.home, request.prefiller = home, prefiller
        ctx.reserve(request, home)
        if prefiller != home:
            ctx.reserve(request, prefiller)
        request.move(State.PREFILL)
        prefill(ctx, request, prefiller)
        if prefiller != home:
            send_kv(ctx, request, prefiller, home, len(request.tokens))


def fit(ctx: Context) -> None:
    """Hold requests that came before any target worker, as after a coordinator's death, to the fleet's limits."""
    limits = ctx.credits.limits(ctx.settings.room)
    if limits is None:
        return
    for request in [ctx.requests[number] for number in ctx.queue if not ctx.requests[number].fits]:
        try:
            request.params = limits.fit(request.tokens[: request.prompt_length], request.params)
        except InvalidField as error:
            ctx.refuse(request.client, request.key, error, request.emitted)
            ctx.forget(request)
        else:
            request.fits = True
            complete(ctx, request)


def complete(ctx: Context, request: Request) -> None:
    """End a request that was resubmitted with all its tokens: its terminal message got lost."""
    if request.emitted:
        reason = finish_reason(request.params, request.emitted, request.tokens[-1])
        if reason:
            ctx.emit(request, request.emitted, reason)
            ctx.forget(request)


def prefill(ctx: Context, request: Request, worker: str) -> None:
    """Compute all committed tokens there, and the outcome after the last."""
    hold = request.holds[worker]
    task = ctx.open_task(request, worker, ())
    hold.opened, hold.computed = True, len(request.tokens)
    ctx.credits.prefixes.note(worker, request.tokens)
    ctx.send(
        worker,
        Extend(
            request=request.number,
            epoch=request.epoch,
            task=task,
            start=0,
            tokens=tuple(request.tokens),
            params=request.params,
        ),
    )


def prefilled(ctx: Context, request: Request) -> None:
    """The first outcome was committed and the request goes on: decode, as soon as all of its KV is at home."""
    assert request.home is not None
    hold = request.holds[request.home]
    if hold.ticket is None:
        at_home(ctx, request)
        return
    request.move(State.TRANSFER)
    hold.sent_s = ctx.now


def at_home(ctx: Context, request: Request) -> None:
    """Its KV is at home, and the first outcome is known: decode."""
    assert request.prefiller is not None
    if request.prefiller != request.home:
        ctx.close(request, request.prefiller)
    decode(ctx, request)


def send_kv(ctx: Context, request: Request, source: str, to: str, length: int) -> None:
    """Send KV of the first `length` committed tokens, which `source` holds or is asked to compute: it sends them as
    they come. The receiver's books are told the tokens."""
    ticket = ctx.future()
    hold = request.holds[to]
    hold.opened, hold.ticket, hold.source, hold.sent_s = True, ticket, source, ctx.now
    hold.computed = length
    incarnations = {name: ctx.credits.workers[name].hello.incarnation for name in (source, to)}
    ctx.send(
        to,
        ReceiveKV(
            request=request.number,
            epoch=request.epoch,
            ticket=ticket,
            peer=source,
            peer_incarnation=incarnations[source],
            start=0,
            length=length,
            tokens=tuple(request.tokens[:length]),
            params=request.params,
        ),
    )
    ctx.send(
        source,
        SendKV(
            request=request.number,
            epoch=request.epoch,
            ticket=ticket,
            peer=to,
            peer_incarnation=incarnations[to],
            start=0,
            length=length,
        ),
    )


def received(ctx: Context, request: Request, worker: str) -> None:
    """KV arrived. At home, decoding begins once the prefill is answered; a verifier may judge from now on."""
    hold = request.holds[worker]
    hold.ticket = hold.source = None
    ctx.credits.prefixes.note(worker, request.tokens[: hold.computed])
    if request.state is State.TRANSFER and worker == request.home:
        at_home(ctx, request)
    elif request.state is State.DRIVEN:
        driving.drive(ctx, request)


def decode(ctx: Context, request: Request) -> None:
    """KV is at home: drive futures if the policy wants remote work and a drafter is there, else lease."""
    choosing.tune(ctx, request)
    if choosing.wants_lease(ctx, request):
        lease(ctx, request)
    else:
        request.move(State.DRIVEN)
        bind_verifiers(ctx, request)
        driving.drive(ctx, request)


def lease(ctx: Context, request: Request) -> None:
    """Let the home worker run rounds on its own. Nothing of the request is in flight there."""
    home = request.home
    assert home is not None
    request.move(State.LEASED)
    request.leased_s = ctx.now
    for other in [name for name in request.holds if name != home]:
        ctx.close(request, other)
    request.void()
    hold = request.holds[home]
    commit, drop = hold.take_fates()
    drafts = choosing.drafts_at(ctx, request, home)
    start, hold.computed = hold.computed, len(request.tokens) - 1
    ctx.send(
        home,
        Lease(
            request=request.number,
            epoch=request.epoch,
            start=start,
            tokens=tuple(request.tokens[start:]),
            commit=commit,
            drop=drop,
            emitted=request.emitted,
            shape=choosing.local_shape(ctx, request) if drafts else None,
            nodes=choosing.sizes(ctx, request).nodes if drafts else 0,
            params=request.params,
        ),
    )


def revoke(ctx: Context, request: Request) -> None:
    """Ask a leased request back, to drive it from here."""
    assert request.home is not None
    request.move(State.REVOKING)
    ctx.send(request.home, Revoke(request=request.number, epoch=request.epoch))


def progress(ctx: Context, request: Request, message: Progress) -> None:
    """Tokens of a leased request. A gap or a repeat is a fault of the worker."""
    assert request.home is not None
    if message.start != request.emitted:
        ctx.suspect(request.home, f"progress of request {request.number} at {message.start}, not {request.emitted}")
        return
    reason = None
    for token in message.tokens:
        request.tokens.append(token)
        reason = finish_reason(request.params, request.emitted, token)
        if reason:
            break
    request.logprobs += message.logprobs[: request.emitted - message.start]
    request.holds[request.home].computed = len(request.tokens) - 1
    ctx.credits.grow(request.home, request.number, len(request.tokens))
    for drafted, accepted in zip(message.drafted, message.accepted, strict=True):
        request.tally.rounds += 1
        tally_round(ctx, request, drafted, accepted)
    ctx.emit(request, message.start, reason)
    if reason:
        ctx.forget(request)


def tally_round(ctx: Context, request: Request, drafted: int, accepted: int) -> None:
    """Count one leased round by depth."""
    for i in range(drafted):
        request.tally.note(request.tally.drafted, i)
    for i in range(accepted):
        request.tally.note(request.tally.accepted, i)
    ctx.learn(tried=min(drafted, accepted + 1), kept=accepted)
    for _ in range(accepted):
        ctx.planner.judged(choosing.kind(request), 0, 1)
    if accepted < drafted:
        ctx.planner.judged(choosing.kind(request), None, 1)


def lost_worker(ctx: Context, request: Request, worker: str) -> None:
    """A worker that had a part in this request no longer has: go on without it, or start over elsewhere."""
    ctx.lose(request, worker)
    if request.drafting and request.drafting.worker == worker:
        request.drafting = None
    needs = {State.PREFILL: {request.home, request.prefiller}, State.TRANSFER: {request.home, request.prefiller}}
    if request.state in (State.QUEUED, State.DONE):
        return
    if worker in needs.get(request.state, {request.home}):
        ctx.requeue(request)
        return
    for other in [name for name, hold in request.holds.items() if hold.source == worker and hold.ticket]:
        ctx.close(request, other)
        lost_ticket(ctx, request, other)
    if request.state is State.DRIVEN:
        driving.drive(ctx, request)


def lost_ticket(ctx: Context, request: Request, worker: str) -> None:
    """KV did not arrive at `worker`, which holds nothing of the request any more."""
    ctx.counters["transfers_lost"] += 1
    request.avoid.add(worker)
    if request.state in (State.PREFILL, State.TRANSFER) and worker == request.home:
        request.prefills_at_home = True  # a link that fails once may fail again, and computing never does
        ctx.requeue(request)


def refused(ctx: Context, request: Request, worker: str, reason: str) -> None:
    """A worker gave the request up and freed it; its credit is back already."""
    request.refusals += worker in request.holds
    ctx.lose(request, worker)
    error: RequestError | None = None
    constraint = request.params.constraint
    if reason == "constraint" and constraint is not None:  # another worker could not compile it either
        error = RequestError(f"constraint: workers cannot hold the output to this {constraint.kind}", "constraint")
    elif request.refusals > MAX_REFUSALS:
        error = Unavailable("no worker has room for this request")
    if error is not None:
        ctx.refuse(request.client, request.key, error, request.emitted)
        ctx.forget(request)
        return
    request.avoid.add(worker)
    lost_worker(ctx, request, worker)


def bind_verifiers(ctx: Context, request: Request) -> None:
    """Send KV to the verifiers that the policy wants beside home: one, or all for those that keep several busy.

    Other decode workers verify too, as long as they have credits to spare for requests of their own. What only they
    judge, a drafter at home that reads features cannot draft below: for a policy that keeps one busy, home is the one.
    """
    assert request.home is not None
    if not request.computed_by(request.home):
        return
    request.bound_for = request.acting
    for name in left_behind(request):
        ctx.close(request, name)
    wanted = [name for name in ctx.credits.role("verify") if name not in request.avoid]
    most = 0 if ctx.settings.local_drafts and ctx.settings.features else 1
    if request.acting in EAGER:
        wanted += [name for name in ctx.credits.spare("decode") if name not in request.avoid | {request.home}]
        most = len(wanted)
    bound = [name for name in request.holds if name != request.home]
    for _ in range(min(most, len(wanted)) - len(bound)):
        worker = ctx.credits.least_loaded((name for name in wanted if name not in request.holds), len(request.tokens))
        if worker is None:
            return
        ctx.reserve(request, worker)
        send_kv(ctx, request, request.home, worker, request.computed_by(request.home))


def left_behind(request: Request) -> list[str]:
    """Verifiers that were not asked for long, as after a policy that needs no second one: home holds far more."""
    assert request.home is not None
    most = request.computed_by(request.home) - LAG
    idle = request.holds.keys() - {task.worker for task in request.tasks.values()}
    return [name for name in sorted(idle) if request.holds[name].ticket is None and request.holds[name].computed < most]
