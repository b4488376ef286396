"""Which requests take part in a step, and the pages that they need for it.

Knows works, pages, and who gives way to whom. Does not know what is computed, or which messages wait.

A leased request holds room for two rounds ahead, so that a round may begin before the one before it is read, and
newcomers do not take what running streams are about to need. That room is the first that goes when pages are short.
"""

from __future__ import annotations

from distspec.engine import Engine, Segment
from distspec.errors import IllegalTransition, OutOfPages
from distspec.protocol.messages import Refused
from distspec.rounds.held import Held, Holdings
from distspec.rounds.plan import share

Row = tuple[Held, Segment]


class Admission:
    """budget: most rows of a step."""

    def __init__(self, engine: Engine, held: Holdings, budget: int) -> None:
        self._engine = engine
        self._held = held
        self._budget = budget
        self._rows: dict[int, Row] = {}
        self._refused: list[Refused] = []

    def admit(self) -> tuple[list[Row], list[Refused]]:
        """The segments of the next step, pages reserved; and a Refused for each request given up for want of pages."""
        self._rows, self._refused = {}, []
        working = {id(held.work): held for held in self._held if held.work is not None}
        for work, most in share([held.work for held in working.values() if held.work], self._budget):
            held = working[id(work)]
            while held.work is work:
                segment = work.segment(held.slot, most)
                try:
                    self._fit(held, segment)
                except OutOfPages:
                    if not self._make_room(held):
                        break
                except IllegalTransition:
                    self._refused.append(self._held.give_up(held, "state"))
                else:
                    self._rows[held.request] = held, segment
                    break
        return list(self._rows.values()), self._refused

    def _fit(self, held: Held, segment: Segment) -> None:
        """Reserve pages and prove the segment legal. Raises OutOfPages, IllegalTransition.

        A lease whose last committed token is in the segment wants room for two rounds, but makes do with this one.
        """
        ahead = len(segment.tokens) - 1 + held.ahead if segment.tokens and segment.want else 0
        try:
            self._engine.reserve(segment.slot, max(segment.rows, ahead))
        except OutOfPages:
            self._engine.reserve(segment.slot, segment.rows)
        end = self._engine.sequence(segment.slot).check(len(segment.committed), segment.nodes)
        if end > self._engine.max_model_len:
            raise IllegalTransition(f"{end} tokens, max_model_len is {self._engine.max_model_len}")

    def _make_room(self, held: Held) -> bool:
        """Free pages for `held`: what leases hold ahead goes first, then its own drafts, then the request opened last,
        itself at worst.

        Requests with a transfer under way are passed over, since their pages could not be used yet. False if
        nothing is left to give.
        """
        assert held.work is not None
        if self._reclaim():
            return True
        if held.lease is not None and held.work.tokens and held.work.undraft():
            return True
        victim = self._held.newest()
        if victim is None:
            return False
        self._rows.pop(victim.request, None)
        self._refused.append(self._held.give_up(victim, "pages"))
        return True

    def _reclaim(self) -> bool:
        """Take back the room of leases that this step does not use; whether there was any."""
        gone = 0
        for held in self._held:
            if held.lease is not None:
                _, segment = self._rows.get(held.request, (held, None))
                gone += self._engine.sequence(held.slot).trim(segment.rows if segment is not None else 0)
        return gone > 0
