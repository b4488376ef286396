"""Driven futures: what the policy wishes becomes messages, verdicts and drafts become committed tokens.

The policy sees a tree and free verifiers. Here every submission gets what its verifier still lacks of the
path, and every draft what its drafter still lacks, so a verdict is only asked where the whole path is held.
"""

from __future__ import annotations

from itertools import count, zip_longest
from math import isnan
from operator import lt

from msgspec.structs import replace

from distspec.coordinator import feeding
from distspec.coordinator.context import Context
from distspec.coordinator.notes import Grown
from distspec.coordinator.planner import PROBE_TOKENS, PROBED_TOKENS, Kind
from distspec.coordinator.request import Request, State
from distspec.protocol.messages import Draft, Drafted, Extend, Verdict, Withdraw
from distspec.protocol.values import ROOT, Shape, finish_reason
from distspec.speculation.length import best_length
from distspec.speculation.policies import EAGER, POLICIES, Growth, Policy, Situation, Submission
from distspec.speculation.sizes import Sizes

MAX_STEPS = 8
"""Most drafted levels of a round when their number follows the measured cost."""

SLACK = 1e-3
"""What rounding may lift a log-probability above 0."""

MAX_OFFENCES = 8
"""Nonsense that a draft worker may answer before nobody asks it any more."""


def sizes(ctx: Context, request: Request) -> Sizes:
    """The sizes of this request's rounds: as asked by the request, as configured, or the best for what is known."""
    settings = ctx.settings
    if request.advice is not None:
        return request.advice.sizes
    levels = steps(ctx, request)
    nodes = settings.nodes or (levels if settings.topk == 1 else settings.live)
    live = min(settings.live, settings.room) if request.acting in EAGER else settings.live
    return Sizes(
        steps=levels,
        topk=settings.topk,
        nodes=min(max(nodes, request.steps or 0), settings.room),
        lookahead=settings.lookahead,
        fan=max(settings.fan, settings.topk),
        width=settings.width,
        live=live,
        early=settings.early,
    )


def steps(ctx: Context, request: Request) -> int:
    """Drafted levels of a round."""
    asked = request.steps or ctx.settings.steps
    if isinstance(asked, tuple):
        running = len(ctx.requests) - len(ctx.queue)
        asked = next((levels for most, levels in asked if running <= most), asked[-1][1])
    if asked is not None:
        return min(asked, ctx.settings.room)
    curve = ctx.credits.workers[request.home].hello.step_cost if request.home in ctx.credits.workers else ()
    return best_length(curve, ctx.acceptance, min(MAX_STEPS, ctx.settings.room))


def wants_lease(ctx: Context, request: Request) -> bool:
    """Plain decoding and local drafting run at home; so does a request for which there is no drafter."""
    local = ctx.settings.local_drafts and request.acting == "sd"
    return request.acting == "ar" or local or not has_drafter(ctx, request)


def drafts_at(ctx: Context, request: Request, home: str) -> bool:
    """Whether a lease at this worker comes with drafts."""
    worker = ctx.credits.workers[home]
    return worker.hello.drafts and request.acting != "ar" and not worker.barred


def local_shape(ctx: Context, request: Request) -> Shape:
    """The drafter's tree of a leased round."""
    wanted = sizes(ctx, request)
    return Shape(
        steps=wanted.steps,
        topk=wanted.topk,
        width=wanted.topk,
        nodes=max(wanted.live, wanted.nodes),
        odds=odds(ctx, request),
    )


def odds(ctx: Context, request: Request) -> tuple[float, ...]:
    """How often guesses of each rank are right, for a static tree; none for a dynamic one."""
    return ctx.planner.odds(kind(request)) if ctx.settings.static else ()


def kind(request: Request) -> Kind:
    """Requests of a kind share what is known of guesses."""
    return (request.params.temperature == 0,)


def tune(ctx: Context, request: Request) -> bool:
    """Take the policy and sizes that are best now, for a request that leaves the choice. True if they changed.

    What is in flight goes on and counts, whichever policy sent it; of a request that is leased the caller revokes the
    lease. A request that waited until nothing is in flight would be out of step with all others for long.
    """
    if request.policy != "auto":
        return False
    local = ctx.settings.local_drafts
    names = [name for name in ctx.settings.allowed_policies if name in POLICIES]
    usable = [name for name in names if not local or name in ("ar", "sd")] if has_drafter(ctx, request) else ["ar"]
    targets = len(ctx.credits.role("decode")) + len(ctx.credits.role("verify"))
    drafters = 0 if local else max(1, len(ctx.credits.role("draft")))
    running = len(ctx.requests) - len(ctx.queue)
    tokens = ctx.counters["tokens"]
    advice = ctx.planner.advise(kind(request), running, targets, drafters, usable, ctx.now, tokens)
    since = request.emitted - request.tuned
    if advice.policy == "ar" and len(usable) > 1:
        is_probing = request.advice is not None and request.advice == ctx.planner.probe(usable)
        if (request.acting == "ar" and since >= PROBE_TOKENS) or (is_probing and since < PROBED_TOKENS):
            advice = ctx.planner.probe(usable)
            ctx.planner.probes()
    changed = advice != request.advice
    if changed:
        request.acting, request.advice, request.tuned = advice.policy, advice, request.emitted
    return changed


def has_drafter(ctx: Context, request: Request) -> bool:
    return request.drafting is not None or find_drafter(ctx, request) is not None


def find_drafter(ctx: Context, request: Request) -> str | None:
    """A draft worker with a credit, or home where drafting is local."""
    home = ctx.credits.workers.get(request.home or "")
    if ctx.settings.local_drafts and home is not None and home.hello.drafts and not home.barred:
        return request.home
    drafters = (name for name in ctx.credits.role("draft") if name not in request.avoid)
    return ctx.credits.least_loaded((name for name in drafters if not ctx.credits.workers[name].barred), 0)


def attach(ctx: Context, request: Request) -> None:
    """Bind a drafter, if none is bound; the caller has seen that there is one."""
    if request.drafting is None:
        worker = find_drafter(ctx, request)
        assert worker is not None
        ctx.attach_drafter(request, worker)


def drive(ctx: Context, request: Request) -> None:
    """Commit what is known, then submit and draft what the policy wishes. Ends the request if it is done."""
    if advance(ctx, request):
        return
    tune(ctx, request)
    if wants_lease(ctx, request):
        return  # `settle` leases it once nothing is in flight
    attach(ctx, request)
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
        ctx.learn(tried=step.children > 0, kept=is_drafted)
        if step.children:
            ctx.planner.judged(kind(request), step.rank, step.children)
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
        sizes=sizes(ctx, request),
        odds=odds(ctx, request),
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


def verdict(request: Request, message: Verdict) -> bool:
    """Record outcomes by node id; those of nodes that are gone say nothing. False for a future that is void."""
    task = request.tasks.pop(message.task, None)
    if task is None:
        return False
    if not request.emitted:
        request.prompt_logprobs = message.prompt_logprobs
    tree, judged = request.tree, request.holds[task.worker].judged
    for (node, outcome), logprobs in zip_longest(message.outcomes, message.logprobs[: len(message.outcomes)]):
        known = task.root if node == ROOT else node
        if known in tree:
            judged.add(known)
        if tree.judge(known, outcome, logprobs):
            request.origins.judged(message.task, known)
    return True


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


def drafted(ctx: Context, request: Request, worker: str, message: Drafted) -> bool:
    """Hang a proposal into the tree, a late one too: it says itself where it belongs. Nonsense is counted and taken
    as no proposal. False if nothing has changed."""
    state = request.drafting
    if state is None or state.worker != worker:
        return False
    new, is_awaited = 0, state.task == message.task
    if is_sound(ctx, request, message):
        new = request.graft(message, ctx.settings.live)
        ctx.notes.append(Grown(message.task, new))
    else:
        offend(ctx, worker)
        is_awaited = state.task is not None  # there will be no better answer
    if state.task == message.task and not state.quick:
        state.feed.arrived()
    if is_awaited:
        state.task = None
        state.dry = not new and not state.quick and message.base == len(request.tokens)
    return is_awaited or new > 0


def is_sound(ctx: Context, request: Request, message: Drafted) -> bool:
    """A proposal within what may be asked: a draft that was sent, known ids, parents before children."""
    vocab_size = min(worker.hello.vocab_size for worker in ctx.credits.workers.values())
    tokens, parents, scores = message.tokens, message.parents, message.scores
    return (
        ctx.is_future(message.task)
        and message.epoch <= request.epoch
        and 0 < message.base <= len(request.tokens)
        and len(tokens) == len(parents) <= ctx.settings.live
        and (not tokens or 0 <= min(tokens) <= max(tokens) < vocab_size)
        and (not parents or min(parents) >= ROOT)
        and all(map(lt, parents, count()))
        and (not scores or len(scores) == len(tokens))
        and (not scores or (max(scores) <= SLACK and not isnan(sum(scores))))
    )


def offend(ctx: Context, worker: str) -> None:
    """Count nonsense; after too much of it, no new draft is asked of this worker."""
    entry = ctx.credits.workers[worker]
    entry.offences += 1
    ctx.counters["bad_drafts"] += 1
    if entry.offences == MAX_OFFENCES:
        entry.barred = True
        ctx.counters["barred_drafters"] += 1


def tally_round(ctx: Context, request: Request, drafted: int, accepted: int) -> None:
    """Count one leased round by depth."""
    for i in range(drafted):
        request.tally.note(request.tally.drafted, i)
    for i in range(accepted):
        request.tally.note(request.tally.accepted, i)
    ctx.learn(tried=min(drafted, accepted + 1), kept=accepted)
    for _ in range(accepted):
        ctx.planner.judged(kind(request), 0, 1)
    if accepted < drafted:
        ctx.planner.judged(kind(request), None, 1)
