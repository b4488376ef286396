"""How far counts are from the probabilities that they should have."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

Cell = TypeVar("Cell", bound=Hashable)

SOUND, FAULTY = 4.0, 5.0
"""Standard deviations: a sound sampler stays within the first, a planted fault is beyond the second."""


def g_test(seen: Counter[Cell], exact: Mapping[Cell, float]) -> float:
    """Sokal & Rohlf's G with rare cells pooled, as a normal deviate (Wilson & Hilferty 1931)."""
    total = seen.total()
    cells = [(seen[cell], total * p) for cell, p in exact.items() if total * p >= 5]
    rest = total - sum(o for o, _ in cells), total - sum(e for _, e in cells)
    cells += [rest] if rest[1] > 0 else []
    g: float = 2 * sum(o * math.log(o / e) for o, e in cells if o)
    free = len(cells) - 1
    deviate: float = ((g / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    return deviate
