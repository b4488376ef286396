"""One step of the engine as values: what is asked for, and the rows it becomes.

Knows segments, sequences and rows. Does not know models, or how attention is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from distspec.attention import Span
from distspec.kv.sequence import Sequence
from distspec.protocol.values import Node, SamplingParams, TokenLogprobs
from distspec.sampling import Asked


@dataclass(frozen=True, slots=True)
class Segment:
    """Work for one slot: tokens to commit at its end, then nodes to judge below them.

    want False: nobody needs the outcome after the last of `tokens` (a prefill chunk that is not the last). bet: a
    guess of what follows `tokens`, committed with them as if it were right, so that it costs no more than a token;
    whoever asks takes it back (Sequence.retract) where the outcome before it is another. Comes without nodes. laws: of
    each node, or of the bet, what it was drawn from, see sampling.rejection; empty where drafts are not drawn so.
    given: what follows each of the first so many of `tokens`, where logprobs of that are to be told. Where the token of
    a node is a guess of the step before, something may stand in for it, see stand_in.
    """

    slot: int
    tokens: tuple[int, ...]
    nodes: tuple[Node, ...] = ()
    want: bool = True
    bet: int | None = None
    laws: tuple[Tensor, ...] = ()
    given: tuple[int, ...] = ()

    @property
    def committed(self) -> tuple[int, ...]:
        """What it commits, at least for the time of the step."""
        return self.tokens if self.bet is None else (*self.tokens, self.bet)

    @property
    def rows(self) -> int:
        return len(self.tokens) + len(self.nodes) + (self.bet is not None)

    @property
    def wanted(self) -> int:
        """Rows whose outcome somebody needs."""
        return bool(self.tokens and self.want) + len(self.nodes) + (self.bet is not None)


@dataclass(frozen=True, slots=True)
class Guesses:
    """What may follow a row. ranked: (token, log-probability) pairs, the best first. law: what the only one was drawn
    from, see sampling.rejection; None where guesses are not drawn so."""

    ranked: tuple[tuple[int, float], ...]
    law: Tensor | None = None


T = TypeVar("T")


@dataclass(slots=True)
class Outcome(Generic[T]):
    """What follows: a drawn token, or guesses. root: after the last of the segment's tokens (None without tokens, or
    if nobody wanted it); nodes: after each of its nodes, in their order, or after its bet. logprobs: of these drawn
    tokens, in this order, where the slot asks for them; given: of the segment's given tokens."""

    root: T | None
    nodes: list[T]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    given: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class Batch:
    """The rows of a step, segment after segment: committed tokens, then nodes.

    tokens, positions: one per row. wanted: rows whose outcome is drawn; params, draws: the parameters of each
    of these, and the absolute position of the token it draws. asked: segments with wanted rows whose logits are to be
    edited. given: (row, token, most): what follows a row, of which logprobs are told, and how many of the likeliest
    tokens beside it. spans: one per segment that has rows. guesses: int64 [n, most], on the device, of the step before:
    what tokens stand in for.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    given: list[tuple[int, int, int]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    guesses: Tensor | None = None

    def add(self, segment: Segment, sequence: Sequence, params: SamplingParams, edited: bool = False) -> None:
        """Book a segment in its sequence (see Sequence.append and add) and take over its rows."""
        wanted = len(self.wanted)
        self.given += [
            (row, token, params.prompt_logprobs or 0) for row, token in enumerate(segment.given, len(self.tokens))
        ]
        if segment.nodes:
            self._add_tree(segment, sequence, params)
        else:
            self._add_straight(segment, sequence, params)
        if edited and len(self.wanted) > wanted:
            self.asked.append(_asked(segment, sequence, wanted))

    def _add_tree(self, segment: Segment, sequence: Sequence, params: SamplingParams) -> None:
        start = sequence.length
        indices = sequence.append(segment.tokens) + sequence.add(segment.nodes)
        first = len(self.tokens) + len(segment.tokens)
        roots = [first - 1] if segment.tokens and segment.want else []
        self.tokens += segment.tokens
        self.tokens += [node.token for node in segment.nodes]
        self.positions += range(start, sequence.length)
        self.positions += [sequence.position(node.id) for node in segment.nodes]
        self._want([*roots, *range(first, first + len(segment.nodes))], params)
        nodes = tuple(sequence.ancestors(node.id) for node in segment.nodes)
        self._attend(sequence, len(segment.tokens), nodes, indices)

    def _add_straight(self, segment: Segment, sequence: Sequence, params: SamplingParams) -> None:
        """The short way of decode steps and rounds that judge one guess: no masks, all rows at the committed end."""
        tokens = segment.committed
        if not tokens:
            return
        indices = sequence.append(tokens)
        self.tokens += tokens
        self.positions += indices
        last = len(self.tokens) - 1
        if segment.bet is not None:
            self._want([last - 1, last], params)
        elif segment.want:
            self._want([last], params)
        self._attend(sequence, len(tokens), (), indices)

    def _want(self, rows: list[int], params: SamplingParams) -> None:
        self.wanted += rows
        self.params += [params] * len(rows)
        self.draws += [self.positions[row] + 1 for row in rows]

    def _attend(self, sequence: Sequence, suffix: int, nodes: tuple[list[int], ...], indices: Iterable[int]) -> None:
        write = [sequence.location(index) for index in indices]
        self.spans.append(Span(sequence.pages, sequence.length, suffix, nodes, write))

    def borrowed(self) -> list[int]:
        """The rows with tokens that stand in for guesses, and then, as many, the numbers of these."""
        rows = [row for row, token in enumerate(self.tokens) if token < 0]  # see stand_in
        return [*rows, *(_guess(self.tokens[row]) for row in rows)]

    def settle(self, tokens: Tensor, borrowed: Tensor) -> None:
        """Put guesses in the place of tokens that stand in for them. tokens: int64 [rows], or more, on the device;
        borrowed: int64, as `borrowed` says, there too."""
        if len(borrowed) and self.guesses is not None:
            ours, theirs = borrowed.chunk(2)
            tokens.index_copy_(0, ours, self.guesses.flatten().index_select(0, theirs))

    @staticmethod
    def outcomes(segments: Iterable[Segment], drawn: Iterable[T]) -> list[Outcome[T]]:
        """What the wanted rows yielded, dealt back to their segments."""
        tokens = iter(drawn)
        return [
            Outcome(
                root=next(tokens) if segment.tokens and segment.want else None,
                nodes=[next(tokens) for _ in segment.nodes] if segment.bet is None else [next(tokens)],
            )
            for segment in segments
        ]


def stand_in(guess: int) -> int:
    """What stands for a token that only the device knows so far: the guess of this number of the step before, counted
    row after row. It is below 0, and so no token."""
    return -1 - guess


def _guess(token: int) -> int:
    """The number of the guess that this one stands for."""
    return -1 - token


def _asked(segment: Segment, sequence: Sequence, first: int) -> Asked:
    """The texts of a segment's wanted rows, the first of which is row `first` of these. A bet counts as a draft: it may
    be taken back."""
    paths: list[tuple[int, ...]] = [()] if segment.tokens and segment.want else []
    paths += [(segment.bet,)] if segment.bet is not None else [sequence.path(node.id) for node in segment.nodes]
    return Asked(segment.slot, first, sequence.tokens, sequence.length - (segment.bet is not None), paths)
