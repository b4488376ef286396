"""Rounds under way: those that were launched and are not read, and those in which the host still has its part.

Knows the sequences of a round's slots, its chains and its results. Does not know which slots roll, how anything is
computed, or who asked for what.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from distspec.engine.rolling.copies import Arrived
from distspec.engine.rolling.state import Kind
from distspec.kv.sequence import Sequence as Text
from distspec.protocol.values import TokenLogprobs
from distspec.sampling import Asked
from distspec.sampling.logprobs import Telling, Told


@dataclass(slots=True)
class Row:
    """A slot that rolls. bound: tokens that its text has at most after all that was launched. target, drafter: its
    sequences; draft_slot: of the drafter's; known: pages of each that the device knows."""

    bound: int
    target: Text
    drafter: Text | None
    draft_slot: int | None
    known: list[int] = field(default_factory=list)
    draft_known: list[int] = field(default_factory=list)


class Flight:
    """One round that was launched. slots: in it, in order; steps: drafts of each. logprobs: once it was read, of the
    tokens of each slot that asks, empty for the others."""

    def __init__(
        self,
        slots: tuple[int, ...],
        steps: int,
        rows: Sequence[Row],
        arrived: Arrived,
        telling: Telling | None = None,
    ) -> None:
        """arrived: the results, see Round; then what the round tells, if telling is there."""
        self.slots = slots
        self.steps = steps
        self.logprobs: list[tuple[TokenLogprobs, ...]] = [() for _ in slots]
        self._rows = rows
        self._arrived = arrived
        self._telling = telling

    def read(self) -> list[tuple[int, ...]]:
        """The tokens that each slot's round committed, 1 .. steps + 1 of them: the drafts that were accepted, then the
        target's own. Waits for this round, and for none that was launched later. Once only."""
        rows, self._rows = self._rows, []
        results, *told = self._arrived()
        found = []
        for row, (accepted, *outcomes) in zip(rows, results.tolist(), strict=True):
            row.bound -= self.steps - accepted
            found.append(tuple(outcomes[: accepted + 1]))
        if self._telling is not None:
            self.logprobs = self._told(self._telling, Told(*told), [len(tokens) for tokens in found])
        return found

    def _told(self, telling: Telling, told: Told, counts: Sequence[int]) -> list[tuple[TokenLogprobs, ...]]:
        """Of the first so many tokens of each slot."""
        nodes = self.steps + 1
        parts = [range(i * nodes, i * nodes + count) for i, count in enumerate(counts)]
        said = telling.read(told, [row for part in parts for row in part])
        return [tuple(said[row] for row in part if row in said) for part in parts]


@dataclass(frozen=True, slots=True)
class Drafted:
    """chain: int64 [rows, nodes], roots and their drafts; arrived: the same on its way to the host."""

    chain: Tensor
    arrived: Arrived


@dataclass(frozen=True, slots=True)
class Judged(Drafted):
    """logits: float32 [rows * nodes, vocab], after each token of the chains."""

    logits: Tensor

    def asked(self, begun: Begun, slots: Collection[int]) -> list[Asked]:
        """The texts of all rows of some of a round's slots. The root is the first token of each path: books hold it
        only when something was computed after it. Waits for the drafts."""
        if not slots:
            return []
        chains, asked = self.arrived()[0].tolist(), list[Asked]()
        for i, slot in enumerate(begun.slots):
            if slot in slots:
                chain, text = tuple(chains[i]), begun.rows[i].target
                paths = [chain[:end] for end in range(1, len(chain) + 1)]
                asked.append(Asked(slot, i * len(chain), text.tokens, text.length, paths))
        return asked


@dataclass(frozen=True, slots=True)
class Begun:
    """A round of which what needs no host was launched: all up to the target's forward, or to the first thing that the
    host has a part in.

    slots, steps: see Flight. kind: of its draws. places: the slots on the device, int64 [rows]. One of the rest is
    there. drafting: what the drafter says to the roots alone, where the host has a part in each draft. drafted: chains
    in which it has one as a whole.
    """

    slots: tuple[int, ...]
    steps: int
    rows: Sequence[Row]
    kind: Kind
    places: Tensor
    drafting: Judged | None = None
    drafted: Drafted | None = None
    judged: Judged | None = None
