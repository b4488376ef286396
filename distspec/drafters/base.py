"""What a drafter is: sequences in, proposals out.

Knows tokens, lengths and how a request wants its tokens drawn. Does not know committed from speculated
tokens, policies, workers, or who judges a proposal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from distspec.errors import IllegalTransition
from distspec.protocol.messages import ROOT, SamplingParams


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Cut the sequence of `request` to `keep` tokens, append `tokens`, then propose up to `count` more.

    A request that the drafter does not know has the empty sequence. params as in the target's draws, so that
    a drafter that samples can use the same noise.
    """

    request: int
    keep: int
    tokens: tuple[int, ...]
    count: int
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree below the end of a sequence: parents[i] < i, or ROOT (-1). May be empty."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    @staticmethod
    def chain(tokens: Iterable[int]) -> Proposal:
        """Each token below the one before it."""
        tokens = tuple(tokens)
        return Proposal(tokens, tuple(range(ROOT, len(tokens) - 1)))


class Drafter(Protocol):
    """Proposes tokens for many requests at once. Any proposal is legal: a bad one costs time, never tokens."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """One proposal per row, in order; at most `count` tokens, none after a stop token or max_model_len.

        Requests in `rows` are distinct. Raises IllegalTransition, with nothing changed, where a row keeps
        more tokens than the drafter's sequence has.
        """
        ...

    def forget(self, request: int) -> None:
        """Free what is held of a request; one that is not known is fine."""
        ...

    def check(self) -> None:
        """Prove that every page has exactly its holders, where there are pages. Raises AssertionError."""
        ...


def check_row(row: DraftRow, length: int) -> None:
    """Raise IllegalTransition unless a sequence of `length` tokens can be cut as the row says."""
    if not 0 <= row.keep <= length:
        raise IllegalTransition(f"request {row.request}: keep {row.keep} of a drafter's sequence of {length} tokens")


def until_stop(tokens: Iterable[int], params: SamplingParams) -> list[int]:
    """The tokens up to and with the first stop token: nothing after it can be accepted."""
    kept: list[int] = []
    for token in tokens:
        kept.append(token)
        if token in params.stop_token_ids:
            break
    return kept
