"""What verifiers and drafters answered becomes outcomes and nodes of a request's tree.

Workers may say anything: a verdict that nobody waits for is void, and a draft that makes no sense is counted. Sends
nothing: what follows from the tree is for `driving`.
"""

from __future__ import annotations

from itertools import count, zip_longest
from math import isnan
from operator import lt

from distspec.coordinator.context import Context
from distspec.coordinator.notes import Grown
from distspec.coordinator.request import Request
from distspec.protocol.messages import Drafted, Verdict
from distspec.protocol.values import ROOT

SLACK = 1e-3
"""What rounding may lift a log-probability above 0."""

MAX_OFFENCES = 8
"""Nonsense that a draft worker may answer before nobody asks it any more."""


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


def drafted(ctx: Context, request: Request, worker: str, message: Drafted) -> bool:
    """Hang a proposal into the tree, a late one too: it says itself where it belongs. Nonsense is counted and taken
    as no proposal. False if nothing has changed."""
    state = request.drafting
    if state is None or state.worker != worker:
        return False
    new, is_awaited = 0, state.task == message.task
    if is_sound(ctx, request, message):
        new = request.graft(message, ctx.settings.max_live_nodes)
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
        and len(tokens) == len(parents) <= ctx.settings.max_live_nodes
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
