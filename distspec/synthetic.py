"""Synthetic acceptance: a target and a drafter that are hashes, so that guesses are right as often as one says.

For benchmarks on random weights and for simulation. The token after a text depends on the request, the position and
the token before it alone; the drafter's r-th guess is that token with probability odds[r]. Knows integers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

_MASK = (1 << 64) - 1
_OUTCOME, _RANK, _WRONG = 1, 2, 3


def outcome(seed: int, choice: int, position: int, last_token: int, vocab: int) -> int:
    """The target's token at `position` after `last_token`, in 0 .. vocab-1."""
    return _mix(_key(seed, choice, position, last_token), _OUTCOME) % vocab


def guesses(
    seed: int, choice: int, position: int, last_token: int, vocab: int, odds: Sequence[float], topk: int
) -> list[int]:
    """The drafter's best min(topk, vocab-1) guesses of that token, the best first, all different.

    odds[r]: how often the r-th is right; their sum is at most 1. Fewer guesses are a prefix of more.
    """
    key, others = _key(seed, choice, position, last_token), vocab - 1
    right, wrong = _mix(key, _OUTCOME) % vocab, _mix(key, _WRONG)
    rank = _rank(_mix(key, _RANK), odds)
    return [right if r == rank else (right + 1 + (wrong + r) % others) % vocab for r in range(min(topk, others))]


def _rank(uniform: int, odds: Sequence[float]) -> int:
    """Which guess is right, by a number that is uniform in 64 bits; -1: none."""
    point, below = uniform / 2**64, 0.0
    for rank, share in enumerate(odds):
        below += share
        if point < below:
            return rank
    return -1


def _key(seed: int, choice: int, position: int, last_token: int) -> int:
    return _mix(_mix(_stream(seed, choice), position), last_token)


@lru_cache(maxsize=1024)
def _stream(seed: int, choice: int) -> int:
    """What all keys of a request begin with."""
    return _mix(_mix(0, seed), choice)


def _mix(state: int, part: int) -> int:
    """One more number into 64 bits, by the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    state = (state + part + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
