"""Which works take part in a step, and with how many rows.

Knows sizes and arrival. Does not know pages, slots or what the rows mean.
"""

from __future__ import annotations

from collections.abc import Iterable

from distspec.rounds.work import Work

PREFILL_TOKENS = 16
"""A work that began with more tokens than this is a prefill, which lets others go first, to its last chunk."""

PATIENCE = 4
"""Steps without a row after which a work goes before all others, so that nothing starves."""


def share(works: Iterable[Work], budget: int) -> list[tuple[Work, int]]:
    """(work, rows) for the next step, rows >= 1, their sum at most `budget`.

    Decoding and verification go first; prefills share what they leave; each group first come, first served.
    """
    taken = []
    for work in sorted(works, key=_precedence):
        rows = min(work.rows, budget)
        work.waited = 0 if rows else work.waited + 1
        if rows:
            taken.append((work, rows))
            budget -= rows
    return taken


def _precedence(work: Work) -> tuple[bool, bool, int]:
    return work.waited < PATIENCE, work.length > PREFILL_TOKENS, work.arrival
