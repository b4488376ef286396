"""How likely a guess is right by its rank: the one rule of coordinator, drafters and simulated drafters.

Knows ranks and odds. Does not know trees, or where odds come from.
"""

from __future__ import annotations

from collections.abc import Sequence


def share(rank: int, odds: Sequence[float]) -> float:
    """odds[rank]; ranks beyond the last one known halve from there. odds: at least one."""
    return odds[rank] if rank < len(odds) else odds[-1] / 2 ** (rank - len(odds) + 1)
