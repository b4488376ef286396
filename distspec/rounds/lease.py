"""Rounds under a lease that ordinary steps compute: which kind each is, asking the drafter for all that begin, and what
is said when one ends.

Knows what a lease asks for and what the drafter was told. Does not know rounds that roll on the device (rounds.loop),
or other work of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import structs

from distspec.drafters.base import Drafter, DraftRow, taps_of
from distspec.engine import Engine
from distspec.protocol.messages import Fault, Lease, Progress
from distspec.rounds.features import features
from distspec.rounds.held import Held
from distspec.rounds.pair import Pair
from distspec.rounds.round import Round


def begin(held: Held, message: Lease, tokens: Sequence[int], arrival: int, cached: int = 0) -> Round:
    """A round that computes `tokens`, the last of which is its root, `cached` of its message's being there already."""
    if len(tokens) == 1 and held.most == 1 and held.shape is not None and held.shape.topk == 1:
        return Pair(message, tokens[0], arrival)
    return Round(message, tokens, arrival, cached)


def end(held: Held, engine: Engine, arrival: int, span: tuple[float, float]) -> Progress:
    """Commit what the round accepted, emit, and begin the next one unless the stream ended. span: of its steps."""
    work = held.work
    assert isinstance(work, Round)
    assert isinstance(work.message, Lease)
    start, ended = held.emitted, work.end(engine, held.slot, held.params, held.emitted)
    held.emitted += len(ended.tokens)
    if ended.reason is None:
        held.work = begin(held, work.message, ended.tokens[-1:], arrival)
    else:
        held.work = held.lease = None
    engine.sequence(held.slot).trim(held.ahead)
    return Progress(
        request=held.request,
        epoch=work.message.epoch,
        start=start,
        tokens=ended.tokens,
        drafted=(ended.drafted,),
        accepted=(ended.accepted,),
        ended=ended.reason,
        span=span,
        step=work.step,
        drafting=work.drafting,
        logprobs=ended.logprobs,
    )


def draft(drafter: Drafter, rounds: Sequence[Held], engine: Engine, clock: Callable[[], float]) -> list[Fault]:
    """Give every round its nodes, but none that could not be emitted before the stream is full.

    The one token left of a round's work is the root of the tree. Of what the drafter grows, the likeliest
    `Lease.nodes` are judged. A drafter that breaks costs its drafts, not the requests.
    """
    try:
        _draft(drafter, rounds, engine, clock)
    except Exception as error:
        for held in rounds:
            drafter.forget(held.request)
            held.told, held.shape = 0, None
        return [Fault(reason=f"drafter: {type(error).__name__}: {error}")]
    return []


def _draft(drafter: Drafter, rounds: Sequence[Held], engine: Engine, clock: Callable[[], float]) -> None:
    reads = bool(taps_of(drafter))
    rows: list[DraftRow] = []
    takers: list[tuple[Held, Round]] = []
    for held in rounds:
        assert isinstance(held.work, Round)
        held.work.drafted = True
        depth = held.params.max_tokens - held.emitted - 1
        if held.shape is not None and depth > 0:
            shape = held.shape if held.shape.depth <= depth else structs.replace(held.shape, depth=depth)
            root = held.work.tokens[0]
            sequence = engine.sequence(held.slot)
            tokens = (*sequence.tokens[held.told :], root)
            wanted = range(held.told, sequence.length + 1)
            known = features(engine, held.slot, wanted, (root,)) if reads else None
            rows.append(DraftRow(held.request, held.told, tokens, shape, held.params, known))
            takers.append((held, held.work))
    if not rows:
        return
    began_s = clock()
    proposals = drafter.propose(rows)
    ended_s = clock()
    for (held, work), row, proposal in zip(takers, rows, proposals, strict=True):
        held.told = row.keep + len(row.tokens)
        work.drafting = (began_s, ended_s)
        work.hang(proposal, held.most, row.shape)
