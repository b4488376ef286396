"""Features for a drafter: where it reads those that it needs, and for a remote one, which target sends which, and what
follows where they do not arrive.

Knows requests, holdings and tickets. Does not know when a draft is wanted, or what it is made of. Features go from
worker to worker, as KV does; here only tickets are given out.
"""

from __future__ import annotations

from distspec.coordinator.context import Context
from distspec.coordinator.request import Request
from distspec.protocol.messages import SendFeatures
from distspec.protocol.values import ROOT, FeatureTicket

MAX_LOSSES = 2
"""Tickets that may fail in a row before a request does without this drafter: its links may be what is broken."""


def is_due(ctx: Context, request: Request) -> bool:
    """Whether the drafter reads features, and was not sent all that a draft below the text needs: those of every
    position but the last, which nobody may have computed yet. One at home is sent none, and needs a source anyway."""
    draft = request.drafting
    return ctx.settings.features and draft is not None and draft.feed.sent < len(request.tokens) - 1


def source(request: Request) -> str | None:
    """The target that has what is due: home, or else whichever has judged the newest position. None if whoever did
    is gone; somebody will have it when the next verdict is there. A drafter at home reads only what home has."""
    stop, draft = len(request.tokens) - 1, request.drafting
    able = [name for name, hold in request.holds.items() if hold.ticket is None and request.has_judged(name) >= stop]
    if draft is not None and draft.worker == request.home:
        return request.home if request.home in able else None
    return max(able, key=lambda name: name == request.home, default=None)


def send(ctx: Context, request: Request, source: str) -> FeatureTicket:
    """Let the source send the drafter what is due. Returns what the draft is to say of it.

    Where the source was told of what it has committed and has handled that, positions say all. Beyond, a position is a
    node there, or was one.
    """
    draft = request.drafting
    assert draft is not None
    ticket, start, stop = ctx.future(), draft.feed.sent, len(request.tokens) - 1
    draft.feed.send(ticket, source, stop)
    incarnations = {name: ctx.credits.workers[name].hello.incarnation for name in (source, draft.worker)}
    committed = max(start, min(request.computed_by(source), stop))
    ctx.send(
        source,
        SendFeatures(
            request=request.number,
            epoch=request.epoch,
            ticket=ticket,
            peer=draft.worker,
            peer_incarnation=incarnations[draft.worker],
            start=start,
            length=stop - start,
            nodes=tuple(request.carried.get(position, ROOT) for position in range(committed, stop)),
        ),
    )
    return FeatureTicket(ticket=ticket, peer=source, peer_incarnation=incarnations[source], start=start)


def lost(ctx: Context, request: Request, ticket: int) -> bool:
    """A ticket failed, on either side: its draft is asked for anew, with another ticket, or elsewhere. False if it
    was none of the drafter's."""
    draft = request.drafting
    if draft is None or not draft.feed.lose(ticket):
        return False
    ctx.counters["features_lost"] += 1
    draft.unanswerable()
    if draft.feed.losses >= MAX_LOSSES:
        request.avoid.add(draft.worker)
        ctx.detach_drafter(request)
    return True
