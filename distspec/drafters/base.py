"""What a drafter is: sequences in, proposals out.

Knows tokens, lengths and how a request wants its tokens drawn. Does not know committed from speculated
tokens, policies, workers, or who judges a proposal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import structs
from torch import Tensor

from distspec.engine import Engine, MakeChains
from distspec.errors import IllegalTransition
from distspec.kv.pool import KVPool
from distspec.protocol.values import ROOT, SamplingParams, Shape


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Cut the text of `request` to `keep` tokens, append `tokens`, then grow the tree below its end as `shape` says.

    A request that the drafter does not know has the empty text. params as in the target's draws, so that a drafter
    that samples can use the same noise. features: for drafters that ask for them, the target's at the position
    before each of `tokens` (zeros before the first token of a text); [len(tokens), F] on the drafter's device.
    """

    request: int
    keep: int
    tokens: tuple[int, ...]
    shape: Shape
    params: SamplingParams
    features: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree below the end of a text: parents[i] < i, or ROOT (-1), siblings by rank. May be empty.

    scores[i]: log-probability of node i given its parent; empty: no opinion. laws[i]: what node i was drawn from, see
    sampling.rejection; empty where nodes are not drawn so. left: steps of the shape that were not grown, since the
    drafter was called away; it says nothing of the tree then.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...] = ()
    laws: tuple[Tensor, ...] = ()
    left: int = 0

    @staticmethod
    def chain(tokens: Iterable[int]) -> Proposal:
        """Each token below the one before it."""
        tokens = tuple(tokens)
        return Proposal(tokens, tuple(range(ROOT, len(tokens) - 1)))


Called = Callable[[], bool]
"""Whether there is something that a drafter had better hear of before it goes on: it asks between two forwards."""


def never() -> bool:
    """Nobody calls."""
    return False


class Drafter(Protocol):
    """Proposes trees for many requests at once. Any proposal is legal: a bad one costs time, never tokens.

    Between calls a drafter keeps its tree of each request, and the part of it that the text followed.
    """

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """The whole tree of each row after it has grown, in order; nothing below a stop token or past max_model_len.
        One that was made with a `Called` returns early when it is called, see Proposal.left; asked for the steps that
        are left, it goes on as if nothing had been.

        Requests in `rows` are distinct. Raises IllegalTransition, with nothing changed, where a row keeps more
        tokens than the drafter's text has.
        """
        ...

    def forget(self, request: int) -> None:
        """Free what is held of a request; one that is not known is fine."""
        ...

    def check(self) -> None:
        """Prove that every page has exactly its holders, where there are pages. Raises AssertionError."""
        ...


class Loan(Protocol):
    """A text of a drafter, and its engine's slot if it has one, lent to whoever drafts and judges it round after round
    without the host (engine.rolling). The borrower says how the text goes on; the books here say what was computed for
    sure."""

    @property
    def slot(self) -> int | None:
        """Of the drafter's engine; None where it drafts without one."""
        ...

    def hold(self, end: int) -> bool:
        """Have pages for the positions before `end`; False if there are none, or the model takes no text so long."""
        ...

    def follow(self, tokens: Sequence[int], end: int) -> None:
        """The text grew by `tokens`, and is computed but for its last two by now; give back pages past `end`."""
        ...

    def close(self) -> None:
        """Give the slot back. If its request was forgotten meanwhile, its pages are freed only now."""
        ...


class Lender(Protocol):
    """A drafter that drafts chains on the device: by its engine, or by what it makes for that."""

    @property
    def engine(self) -> Engine | MakeChains: ...

    def lend(self, rows: Sequence[DraftRow]) -> list[Loan | None]:
        """Make each text what its row says, shape aside, drop its tree, and compute it but for its last two tokens at
        most; None where there is no room. Until the loan is closed nothing may be proposed for the request.

        Raises IllegalTransition as Drafter.propose.
        """
        ...


def lender_of(drafter: Drafter | None) -> Lender | None:
    """What of a drafter can lend its slots; most have none, and say nothing of it."""
    lender: Lender | None = getattr(drafter, "lender", None)
    return lender


def engine_of(drafter: Drafter | None) -> Engine | None:
    """What of a drafter is an engine that can draft chains on the device."""
    lender = lender_of(drafter)
    return lender.engine if lender is not None and isinstance(lender.engine, Engine) else None


def taps_of(drafter: Drafter | None) -> tuple[int, ...]:
    """Where in the target a drafter wants its features read, see models.Taps; most want none, and say nothing of it."""
    taps: tuple[int, ...] = getattr(drafter, "taps", ())
    return taps


def pools_of(drafter: Drafter | None) -> tuple[KVPool, ...]:
    """What a drafter keeps of positions on its device; most keep nothing, and say nothing of it."""
    pool: KVPool | None = getattr(drafter, "pool", None)
    return () if pool is None else (pool,)


def check_row(row: DraftRow, length: int) -> None:
    """Raise IllegalTransition unless a text of `length` tokens can be cut as the row says."""
    if not 0 <= row.keep <= length:
        raise IllegalTransition(f"request {row.request}: keep {row.keep} of a drafter's text of {length} tokens")


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def limited(shape: Shape, room: int) -> Shape:
    """The shape, no deeper than `room` levels: what max_model_len leaves below a text."""
    return structs.replace(shape, depth=max(0, min(shape.depth, room)))
