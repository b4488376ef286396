"""What a request is to do now: its policy, the sizes of its rounds, and where they are drafted.

Knows what was asked, what is configured, and what the planner advises. Sends nothing: that is for `driving` and
`lifecycle`.
"""

from __future__ import annotations

from distspec.coordinator.context import Context
from distspec.coordinator.planner import PROBE_TOKENS, PROBED_TOKENS, Kind
from distspec.coordinator.request import Request
from distspec.protocol.values import Shape
from distspec.speculation.length import best_length
from distspec.speculation.policies import EAGER, POLICIES
from distspec.speculation.sizes import Sizes

MAX_STEPS = 8
"""Most drafted levels of a round when their number follows the measured cost."""

MOST_NODES = 15
"""Most nodes of a chain that nobody has sized: with the root the widest step that workers have timed when they join."""


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
    drafters = 0 if local else max(1, len(ctx.credits.role("draft")))
    tokens = ctx.counters["tokens"]
    advice = ctx.planner.advise(kind(request), running(ctx), targets(ctx), drafters, usable, ctx.now, tokens)
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


def sizes(ctx: Context, request: Request) -> Sizes:
    """The sizes of this request's rounds: as asked by the request, as configured, or the best for what is known."""
    settings = ctx.settings
    if request.advice is not None:
        return request.advice.sizes
    levels, live = steps(ctx, request), settings.max_live_nodes
    return Sizes(
        steps=levels,
        topk=settings.topk,
        nodes=min(max(judged(ctx, request, levels), request.steps or 0), settings.room),
        lookahead=settings.lookahead,
        branch_topk=max(settings.branch_topk, settings.topk),
        branch_width=settings.branch_width,
        max_live_nodes=min(live, settings.room) if request.acting in EAGER else live,
        branch_nodes=settings.branch_nodes,
    )


def steps(ctx: Context, request: Request) -> int:
    """Drafted levels of a round."""
    asked = request.steps or ctx.settings.steps
    if isinstance(asked, tuple):
        asked = next((levels for most, levels in asked if running(ctx) <= most), asked[-1][1])
    if asked is not None:
        return min(asked, ctx.settings.room)
    return worth(ctx, request, MAX_STEPS)


def judged(ctx: Context, request: Request, levels: int) -> int:
    """Most nodes of a round of so many drafted levels: as configured; of a chain, all that are worth their rows; of a
    tree, max_scratch_nodes with the root, since 64 rows have a graph and 65 take one of 128."""
    settings = ctx.settings
    if settings.nodes is not None:
        return settings.nodes
    if settings.topk == 1:
        return max(levels, worth(ctx, request, MOST_NODES))
    return max(levels, min(settings.max_live_nodes, settings.room - 1))


def worth(ctx: Context, request: Request, most: int) -> int:
    """Drafts of a chain that are worth their rows, if drafting them costs nothing; at most so many. All requests share
    the steps of targets alike; but a lease is told its depth once, and rounds of different depths would be apart, so
    the load of that moment is not asked there."""
    assert request.home is not None
    curve = ctx.credits.workers[request.home].curve
    sharing = 1.0 if ctx.settings.local_drafts else max(1.0, running(ctx) / max(1, targets(ctx)))
    return best_length(lambda rows: curve(rows * sharing), ctx.acceptance, min(most, ctx.settings.room))


def running(ctx: Context) -> int:
    """Requests that have a worker."""
    return len(ctx.requests) - len(ctx.queue)


def targets(ctx: Context) -> int:
    """Workers that judge."""
    return len(ctx.credits.role("decode")) + len(ctx.credits.role("verify"))


def odds(ctx: Context, request: Request) -> tuple[float, ...]:
    """How often guesses of each rank are right, for a static tree; none for a dynamic one."""
    return ctx.planner.odds(kind(request)) if ctx.settings.static else ()


def kind(request: Request) -> Kind:
    """Requests of a kind share what is known of guesses."""
    return (request.params.temperature == 0,)


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
        nodes=max(wanted.max_live_nodes, wanted.nodes),
        odds=odds(ctx, request),
    )


def has_drafter(ctx: Context, request: Request) -> bool:
    """One is bound, or one could be."""
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
