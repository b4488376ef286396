"""Run the machine again over a journal: the same events must lead to the same commands.

What a replay shows: a decision can be looked at again with a debugger, and a change of the machine that was
meant to change nothing is proven to change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distspec.coordinator.events import Command, Event
from distspec.coordinator.journal import digest, read
from distspec.coordinator.machine import Machine


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first event whose commands are not those of the journal."""

    index: int
    now_s: float
    event: Event
    commands: list[Command]


@dataclass(frozen=True, slots=True)
class Replay:
    """events: how many were run, all of them if divergence is None."""

    term: int
    events: int
    divergence: Divergence | None


def replay(path: str | Path) -> Replay:
    """Raises BadMessage if the file is no journal of this version."""
    head, entries = read(path)
    machine = Machine(head.settings, head.term)
    index = -1
    for index, entry in enumerate(entries):
        commands = machine.handle(entry.event, entry.now_s)
        if digest(commands) != entry.digest:
            return Replay(head.term, index + 1, Divergence(index, entry.now_s, entry.event, commands))
    return Replay(head.term, index + 1, None)
