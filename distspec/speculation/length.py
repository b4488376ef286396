"""How many tokens are worth drafting, from the measured cost of wider steps and the acceptance seen.

Knows one acceptance, that of a level, and learns none: whoever asks keeps it. `acceptance.py` is for those who must
tell classes and ranks apart. Drafting itself is taken as free: `cost.py` is for those who know more. Does not know
trees or policies.
"""

from __future__ import annotations

from collections.abc import Callable


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Tokens a round commits on average, the bonus token included: (1 - a^(k+1)) / (1 - a) (arXiv 2211.17192, eq. 1).

    As `expected.tau` of one chance for all depths, without a sum: it is asked at every verdict.
    """
    if acceptance >= 1.0:
        return drafts + 1.0
    return float((1 - acceptance ** (drafts + 1)) / (1 - acceptance))


def best_length(cost: Callable[[float], float], acceptance: float, most: int) -> int:
    """The number of drafts, 1 .. most, with the most expected tokens per unit of step time.

    cost: of a step by the rows that this request has in it, in any unit. acceptance: how often a draft is right if
    those before it were.
    """
    return max(range(1, most + 1), key=lambda drafts: expected_tokens(acceptance, drafts) / cost(drafts + 1))
