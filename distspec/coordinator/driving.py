"""Driven futures: what the policy wishes becomes messages, and outcomes become committed tokens.

The policy sees a tree and free verifiers. Here every submission gets what its verifier still lacks of the
path, and every draft what its drafter still lacks, so a verdict is only asked where the whole path is held.
"""

from __future__ import annotations

from msgspec.structs import replace

from distspec.coordinator import choosing, feeding
from distspec.coordinator.context import Context
from distspec.coordinator.request import Request, State
from distspec.protocol.messages import Draft, Extend, Withdraw
from distspec.protocol.values import Shape, finish_reason
from distspec.speculation.policies import EAGER, POLICIES, Growth, Policy, Situation, Submission


def drive(ctx: Context, request: Request) -> None:
    """Commit what is known, then submit and draft what the policy wishes. Ends the request if it is done."""
    if advance(ctx, request):
        return
    choosing.tune(ctx, request)
    if choosing.wants_lease(ctx, request):
        return  # `settle` leases it once nothing is in flight
    choosing.attach(ctx, request)
    policy, now = POLICIES[request.acting](), situation(ctx, request)
    if grow(ctx, request, policy, now):
        now = moved(request, now)
    wishes = policy.submit(now)
    for wish in wishes:
        submit(ctx, request, wish)
    if wishes:  # some only draft beside a forward
        grow(ctx, request, policy, moved(request, now))


def grow(ctx: Context, request: Request, policy: Policy, now: Situation) -> bool:
    """Ask for the drafts that the policy wishes; whether it wishes any."""
    growth = policy.grow(now)
    if growth is not None:
        draft(ctx, request, growth, now)
    return growth is not None


def advance(ctx: Context, request: Request) -> bool:
    """Walk the tree as far as outcomes are known; emit. True if that ended the request."""
    start, reason, is_drafted = request.emitted, None, False
    while reason is None:
        step = request.tree.step()
        if step is None:
            break
        is_drafted = step.node is not None
        ctx.learn(tried=step.children > 0, kept=step.rank is not None and step.rank < ctx.settings.topk)
        if step.children:
            ctx.planner.judged(choosing.kind(request), step.rank, step.children)
        ctx.notes += request.commit(step)
        reason = finish_reason(request.params, request.emitted, step.token)
    if request.emitted > start:
        if request.state is not State.PREFILL:
            request.tally.rounds += 1
            request.tally.hits += is_drafted
        for worker in request.holds:
            ctx.credits.grow(worker, request.number, len(request.tokens))
    ctx.emit(request, start, reason)
    if reason:
        ctx.forget(request)
    else:
        withdraw(ctx, request)
    return reason is not None


def withdraw(ctx: Context, request: Request) -> None:
    """Tell workers which of their futures nobody waits for any more."""
    by_worker: dict[str, list[int]] = {}
    for number in request.stale():
        request.tasks[number].withdrawn = True
        by_worker.setdefault(request.tasks[number].worker, []).append(number)
    for worker, tasks in by_worker.items():
        ctx.counters["withdrawn"] += len(tasks)
        ctx.send(worker, Withdraw(request=request.number, epoch=request.epoch, tasks=tuple(tasks)))


def situation(ctx: Context, request: Request) -> Situation:
    """What the policy may see.

    The last output token is never judged, and a node above it yields one token, the root another: nothing
    deeper could be emitted, nor does it fit max_model_len.
    """
    ready = preferred(ctx, request)
    now = Situation(
        tree=request.tree,
        in_flight=(),
        free=ready,
        total=len(ready),
        drafting=False,
        asked=False,
        dry=False,
        quick=ctx.settings.quick,
        depth=request.params.max_tokens - request.emitted - 1,
        sizes=choosing.sizes(ctx, request),
        odds=choosing.odds(ctx, request),
    )
    return moved(request, now)


def moved(request: Request, before: Situation) -> Situation:
    """The situation after what was submitted and drafted since; the tree is as it was."""
    busy, draft = {task.worker for task in request.tasks.values()}, request.drafting
    return replace(
        before,
        in_flight=request.in_flight(),
        free=[name for name in before.free if name not in busy],
        drafting=draft is not None and draft.task is not None,
        asked=draft is not None and draft.asked,
        dry=draft is None or draft.dry,
    )


def preferred(ctx: Context, request: Request) -> list[str]:
    """Verifiers that hold the request, the best first.

    Policies that keep several busy prefer home, whose KV is there first; the others a worker that only verifies, but
    home to one where others are at home. Of what is alike, each request begins with another one, so that all have work.
    """
    ready = [name for name, hold in request.holds.items() if hold.ticket is None]
    turn = request.number % max(1, len(ready))
    ready = sorted(ready)[turn:] + sorted(ready)[:turn]
    if request.acting in EAGER:
        return sorted(ready, key=lambda name: name != request.home)
    workers = ctx.credits.workers
    return sorted(ready, key=lambda name: (workers[name].hello.role != "verify", name != request.home))


def submit(ctx: Context, request: Request, wish: Submission) -> None:
    """Ask a verifier for verdicts, with the committed tokens and ancestors that it still lacks; for as many nodes as
    its scratch has room for."""
    hold = request.holds[wish.verifier]
    nodes = request.missing(wish.verifier, wish.nodes)[: max(0, ctx.settings.room - len(hold.nodes))]
    if not nodes and hold.computed == len(request.tokens):
        return  # nothing would be computed
    start, ids = hold.computed, tuple(node.id for node in nodes)
    task = ctx.open_task(request, wish.verifier, ids)
    commit, drop = hold.take_fates()
    first, hold.opened = not hold.opened, True
    request.submitted(wish.nodes)
    hold.computed = len(request.tokens)
    hold.nodes.update(ids)
    ctx.send(
        wish.verifier,
        Extend(
            request=request.number,
            epoch=request.epoch,
            task=task,
            start=start,
            tokens=tuple(request.tokens[start:]),
            nodes=tuple(nodes),
            commit=commit,
            drop=drop,
            params=request.params if first else None,
        ),
    )


def draft(ctx: Context, request: Request, wish: Growth, now: Situation) -> None:
    """Ask the drafter to go on, telling it what was committed since it was last asked, and who sends it the features
    of that. Where nobody has these that could, it has nothing to say until the text has gone on."""
    state = request.drafting
    assert state is not None
    features = None
    if not wish.quick and feeding.is_due(ctx, request):
        source = feeding.source(request)
        if source is None:
            state.asked = state.dry = True
            return
        if source != state.worker:
            features = feeding.send(ctx, request, source)
    keep, state.told = state.told, len(request.tokens)
    first, state.opened = not state.opened, True
    state.task, state.sent_s, state.asked, state.quick = ctx.future(), ctx.now, True, wish.quick
    ctx.send(
        state.worker,
        Draft(
            request=request.number,
            epoch=request.epoch,
            task=state.task,
            keep=keep,
            tokens=tuple(request.tokens[keep:]),
            shape=Shape(
                steps=wish.steps,
                topk=wish.topk,
                width=wish.width,
                nodes=wish.nodes,
                depth=now.depth,
                odds=tuple(now.odds),
                quick=wish.quick,
            ),
            params=request.params if first else None,
            features=features,
        ),
    )
