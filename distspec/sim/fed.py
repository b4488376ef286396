"""Features of one text as a simulated draft worker gets them: a cell stands for those of its position.

Knows tickets, positions and what cells must say. Does not know messages, or what is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distspec.sim.memory import Cell
from distspec.sim.violation import Violation


@dataclass(slots=True)
class _Way:
    """Positions start .. stop-1 on their way; cells: once they are there."""

    ticket: int
    start: int
    stop: int
    cells: list[Cell] | None = None


@dataclass(slots=True)
class Fed:
    """cells: of the first positions, without a gap. ways: what comes behind them, in order. gap: a ticket was lost, and
    who asked may not have heard of it yet.
    """

    cells: list[Cell] = field(default_factory=list)
    ways: list[_Way] = field(default_factory=list)
    gap: bool = False

    def expect(self, ticket: int, start: int, stop: int) -> None:
        """From `start` on, this ticket brings what others were to bring, or have brought. Behind a gap it is no use."""
        self._cut(start)
        if start == self._promised and stop > start:
            self.ways.append(_Way(ticket, start, stop))
            self.gap = False
        elif not self.gap:
            raise Violation(f"features of {start} to {stop} to come, {self._promised} are there or promised")

    def needs(self, count: int) -> None:
        """Prove that the first `count` are there, or on their way, unless a loss was told."""
        if self._promised < count and not self.gap:
            raise Violation(f"{self._promised} features are there or promised, {count} are needed")

    @property
    def _promised(self) -> int:
        return self.ways[-1].stop if self.ways else len(self.cells)

    def arrive(self, ticket: int, cells: list[Cell]) -> None:
        for way in self.ways:
            if way.ticket == ticket:
                way.cells = cells
        while self.ways and self.ways[0].cells is not None:
            self.cells += self.ways.pop(0).cells or []

    def lose(self, ticket: int) -> bool:
        """A ticket failed, and with it what would come behind. False if nothing was to come by it."""
        way = next((way for way in self.ways if way.ticket == ticket), None)
        if way is not None:
            self._cut(way.start)
            self.gap = True
        return way is not None

    def check(self, text: Sequence[int]) -> None:
        """Those of every position of the text but the last are there, and are this text's."""
        if self.cells[: len(text) - 1] != [(token, position) for position, token in enumerate(text[:-1])]:
            raise Violation(f"features of {self.cells} for the text {list(text)}")

    def _cut(self, start: int) -> None:
        self.ways = [way for way in self.ways if way.start < start]
        del self.cells[start:]
