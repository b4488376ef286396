"""What simulated workers send each other: KV of a request, or features of its text."""

from __future__ import annotations

from dataclasses import dataclass

from distspec.sim.memory import Cell


@dataclass(slots=True)
class Packet:
    """What the source's memory held; of KV, nothing: the source gave the ticket up."""

    request: int
    ticket: int
    cells: list[Cell]
