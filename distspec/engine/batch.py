"""One step of the engine as values: what is asked for, and the rows it becomes.

Knows segments, sequences and rows. Does not know models, tensors or how attention is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from distspec.attention import Span
from distspec.kv.sequence import Sequence
from distspec.protocol.messages import Node, SamplingParams


@dataclass(frozen=True, slots=True)
class Segment:
    """Work for one slot: tokens to commit at its end, then nodes to judge below them.

    want False: nobody needs the outcome after the last of `tokens` (a prefill chunk that is not the last).
    """

    slot: int
    tokens: tuple[int, ...]
    nodes: tuple[Node, ...] = ()
    want: bool = True

    @property
    def rows(self) -> int:
        return len(self.tokens) + len(self.nodes)


Guesses = tuple[tuple[int, float], ...]
"""(token, log-probability) pairs, the best first."""

T = TypeVar("T")


@dataclass(slots=True)
class Outcome(Generic[T]):
    """What follows: a drawn token, or guesses. root: after the last of the segment's tokens (None without tokens, or
    if nobody wanted it); nodes: after each of its nodes, in their order."""

    root: T | None
    nodes: list[T]


@dataclass(slots=True)
class Batch:
    """The rows of a step, segment after segment: committed tokens, then nodes.

    tokens, positions: one per row. wanted: rows whose outcome is drawn; params, draws: the parameters of each
    of these, and the absolute position of the token it draws. spans: one per segment that has rows.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def add(self, segment: Segment, sequence: Sequence, params: SamplingParams) -> None:
        """Book a segment in its sequence (see Sequence.append and add) and take over its rows."""
        start = sequence.length
        indices = sequence.append(segment.tokens) + sequence.add(segment.nodes)
        if not indices:
            return
        first = len(self.tokens) + len(segment.tokens)
        roots = [first - 1] if segment.tokens and segment.want else []
        self.tokens += segment.tokens
        self.tokens += [node.token for node in segment.nodes]
        self.positions += range(start, sequence.length)
        self.positions += [sequence.position(node.id) for node in segment.nodes]
        wanted = [*roots, *range(first, first + len(segment.nodes))]
        self.wanted += wanted
        self.params += [params] * len(wanted)
        self.draws += [self.positions[row] + 1 for row in wanted]
        self.spans.append(
            Span(
                pages=sequence.pages,
                length=sequence.length,
                suffix=len(segment.tokens),
                nodes=tuple(sequence.ancestors(node.id) for node in segment.nodes),
                write=[sequence.location(index) for index in indices],
            )
        )

    @staticmethod
    def outcomes(segments: Iterable[Segment], drawn: Iterable[T]) -> list[Outcome[T]]:
        """What the wanted rows yielded, dealt back to their segments."""
        tokens = iter(drawn)
        return [
            Outcome(
                root=next(tokens) if segment.tokens and segment.want else None,
                nodes=[next(tokens) for _ in segment.nodes],
            )
            for segment in segments
        ]
