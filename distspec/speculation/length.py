"""How many tokens are worth drafting, from the measured cost of wider steps and the acceptance seen.

Expected tokens of a round with k drafts, each right with probability a given that those before were:
tau(k) = (1 - a^(k+1)) / (1 - a)  (arXiv 2211.17192, eq. 1). Drafting itself is taken as free.

Knows one acceptance, that of a level, and learns none: whoever asks keeps it. `acceptance.py` is for those who must
tell classes, depths and ranks apart. Does not know trees or policies.
"""

from __future__ import annotations

from collections.abc import Sequence


def step_cost(curve: Sequence[float], rows: int) -> float:
    """Cost of a step of `rows`, in units of one row. curve[i] > 0: the measured cost of 2**i rows.

    Linear in between and beyond, but never cheaper than the widest step measured, whatever noise says; without
    a curve every step costs the same.
    """
    if len(curve) < 2:
        return 1.0
    last = len(curve) - 1
    i = min(max(rows.bit_length() - 1, 0), last - 1)
    low, high = 1 << i, 1 << (i + 1)
    cost = curve[i] + (curve[i + 1] - curve[i]) * (rows - low) / (high - low)
    return max(cost, curve[last]) if rows > high else cost


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens a round commits on average, the bonus token included."""
    if acceptance >= 1.0:
        return drafts + 1.0
    return float((1 - acceptance ** (drafts + 1)) / (1 - acceptance))


def best_length(curve: Sequence[float], acceptance: float, most: int) -> int:
    """The number of drafts, 1 .. most, with the most expected tokens per unit of step time."""
    return max(range(1, most + 1), key=lambda k: expected_tokens(acceptance, k) / step_cost(curve, k + 1))
