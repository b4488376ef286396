"""Features of one request's text on their way to its drafter: tickets, and up to which position they reach.

Knows numbers only. Does not know who could send what, or how it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Feed:
    """sent: features of so many first positions are with the drafter, or under way. tickets: what may be under way,
    (source, first position) by number. losses: tickets that failed since the drafter last had all it needed.
    """

    sent: int = 0
    tickets: dict[int, tuple[str, int]] = field(default_factory=dict)
    losses: int = 0

    def send(self, ticket: int, source: str, stop: int) -> None:
        """Those up to `stop` go out."""
        self.tickets[ticket] = source, self.sent
        self.sent = stop

    def arrived(self) -> None:
        """The drafter has had all that was sent."""
        self.tickets.clear()
        self.losses = 0

    def lose(self, ticket: int) -> bool:
        """A ticket failed: what it brought, and what was to come behind it, is to be sent again. False if it had
        arrived, or was given up."""
        if ticket not in self.tickets:
            return False
        self.losses += 1
        self._rewind(self.tickets[ticket][1])
        return True

    def leave(self, source: str) -> bool:
        """A source holds nothing of the request any more. False if nothing was to come from it."""
        starts = [start for name, start in self.tickets.values() if name == source]
        if starts:
            self._rewind(min(starts))
        return bool(starts)

    def _rewind(self, start: int) -> None:
        self.sent = start
        self.tickets = {number: entry for number, entry in self.tickets.items() if entry[1] < start}
