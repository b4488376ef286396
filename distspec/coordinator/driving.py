"""Driven futures: what the policy wishes becomes messages, verdicts and drafts become committed tokens.

The policy sees a tree and free verifiers. Here every submission gets what its verifier still lacks of the
path, and every draft what its drafter still lacks, so a verdict is only asked where the whole path is held.
"""

from __future__ import annotations

from distspec.coordinator.context import Context
from distspec.coordinator.request import Drafting, Request, State
from distspec.protocol.messages import ROOT, Draft, Drafted, Extend, Verdict, finish_reason
from distspec.speculation.length import best_length
from distspec.speculation.policies import POLICIES, Growth, Situation, Submission, depth

MAX_WIDTH = 8
"""Most drafts of a round when their number follows the measured cost."""


def width(ctx: Context, request: Request) -> int:
    """Drafts in a round: as asked by the request, as configured, or the best for cost and acceptance."""
    asked = request.width or ctx.settings.width
    if asked:
        return min(asked, ctx.settings.room)
    curve = ctx.credits.workers[request.home].hello.step_cost if request.home in ctx.credits.workers else ()
    return best_length(curve, ctx.acceptance, min(MAX_WIDTH, ctx.settings.room))


def wants_lease(ctx: Context, request: Request) -> bool:
    """Plain decoding and local drafting run at home; so does a request for which there is no drafter."""
    local = ctx.settings.local_drafts and request.policy == "sd"
    return request.policy == "ar" or local or not has_drafter(ctx, request)


def has_drafter(ctx: Context, request: Request) -> bool:
    return request.drafting is not None or find_drafter(ctx, request) is not None


def find_drafter(ctx: Context, request: Request) -> str | None:
    """A draft worker with a credit, or home where drafting is local."""
    home = ctx.credits.workers.get(request.home or "")
    if ctx.settings.local_drafts and home is not None and home.hello.drafts:
        return request.home
    return ctx.credits.least_loaded((name for name in ctx.credits.role("draft") if name not in request.avoid), 0)


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
    if wants_lease(ctx, request):
        return  # `settle` leases it once nothing is in flight
    attach(ctx, request)
    policy = POLICIES[request.policy]()
    growth = policy.grow(situation(ctx, request))
    if growth is not None:
        draft(ctx, request, growth)
    for submission in policy.submit(situation(ctx, request)):
        submit(ctx, request, submission)


def advance(ctx: Context, request: Request) -> bool:
    """Walk the tree as far as outcomes are known; emit. True if that ended the request."""
    start, reason = request.emitted, None
    while reason is None and (step := request.tree.step()) is not None:
        ctx.learn(tried=step.node is not None or bool(step.died), kept=step.node is not None)
        request.commit(step)
        reason = finish_reason(request.params, request.emitted, step.token)
    if request.emitted > start:
        if request.state is not State.PREFILL:
            request.tally.rounds += 1
        for worker in request.holds:
            ctx.credits.grow(worker, request.number, len(request.tokens))
    ctx.emit(request, start, reason)
    if reason:
        ctx.forget(request)
    return reason is not None


def situation(ctx: Context, request: Request) -> Situation:
    """What the policy may see. `sd` prefers a remote verifier, `dsi` home, whose KV is there first.

    The last output token is never judged, and a node above it yields one token, the root another: nothing
    deeper could be emitted, nor does it fit max_model_len.
    """
    busy = {task.worker for task in request.tasks.values()}
    ready = [name for name, hold in request.holds.items() if hold.ticket is None]
    ready.sort(key=lambda name: (name == request.home) == (request.policy == "sd"))
    left = request.params.max_tokens - request.emitted - 1
    wide = min(width(ctx, request), left)
    room = min(ctx.settings.room, left)
    draft = request.drafting
    return Situation(
        tree=request.tree,
        in_flight=request.in_flight(),
        free=[name for name in ready if name not in busy],
        total=len(ready),
        drafting=draft is not None and draft.task is not None,
        dry=draft is None or draft.dry,
        width=wide,
        depth=min(room, depth(request.policy, wide, ctx.settings.lookahead, len(ready))),
        lookahead=ctx.settings.lookahead,
    )


def submit(ctx: Context, request: Request, wish: Submission) -> None:
    """Ask a verifier for verdicts, with the committed tokens and ancestors that it still lacks."""
    hold = request.holds[wish.verifier]
    nodes = request.missing(wish.verifier, wish.nodes)
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
    for node, outcome in message.outcomes:
        request.tree.judge(task.root if node == ROOT else node, outcome)
    return True


def draft(ctx: Context, request: Request, wish: Growth) -> None:
    """Ask the drafter to grow below a leaf, telling it what changed since it was last asked."""
    state = request.drafting
    assert state is not None
    path = request.tree.path(wish.leaf)
    if state.matched == len(request.tokens):
        shared = _common(state.path, path)
        keep, tokens = state.matched + shared, [request.tree.token(node) for node in path[shared:]]
    else:
        keep = state.matched
        tokens = request.tokens[keep:] + [request.tree.token(node) for node in path]
    first, state.opened = not state.opened, True
    state.matched, state.path = len(request.tokens), path
    state.task, state.leaf, state.count, state.sent_s = ctx.future(), wish.leaf, wish.count, ctx.now
    ctx.send(
        state.worker,
        Draft(
            request=request.number,
            epoch=request.epoch,
            task=state.task,
            keep=keep,
            tokens=tuple(tokens),
            count=wish.count,
            params=request.params if first else None,
        ),
    )


def drafted(ctx: Context, request: Request, message: Drafted) -> bool:
    """Hang a proposal into the tree. Nonsense is counted and taken as no proposal. False for a void future."""
    state = request.drafting
    if state is None or state.task != message.task:
        return False
    state.task = None
    if state.leaf not in request.tree:
        return True
    sound = is_sound(message, state, ctx.credits.workers[state.worker].hello.vocab_size)
    if not sound:
        ctx.counters["bad_drafts"] += 1
    if sound and message.tokens:
        request.tree.add(state.leaf, message.tokens, message.parents)
    else:
        state.dry = True
    return True


def is_sound(message: Drafted, asked: Drafting, vocab_size: int) -> bool:
    """A proposal within what was asked: known ids, parents before children."""
    return (
        len(message.tokens) == len(message.parents) <= asked.count
        and all(0 <= token < vocab_size for token in message.tokens)
        and all(ROOT <= parent < i for i, parent in enumerate(message.parents))
    )


def tally_round(ctx: Context, request: Request, drafted: int, accepted: int) -> None:
    """Count one leased round by depth."""
    for i in range(drafted):
        request.tally.note(request.tally.drafted, i)
    for i in range(accepted):
        request.tally.note(request.tally.accepted, i)
    ctx.learn(tried=min(drafted, accepted + 1), kept=accepted)


def _common(a: list[int], b: list[int]) -> int:
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return shared
