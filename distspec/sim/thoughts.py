"""What a simulated coordinator works out while nobody waits for it: some pieces after each message of a worker."""

from __future__ import annotations

from distspec.coordinator.events import Event, FromWorker, Thought
from distspec.coordinator.machine import Machine

PIECES = 8


def thought(machine: Machine, event: Event) -> Thought | None:
    """The event that follows one which the machine has handled; None where it has nothing to work out."""
    return Thought(PIECES) if isinstance(event, FromWorker) and machine.has_thoughts else None
