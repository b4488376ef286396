"""SplitMix64 on the device, of the words that every kernel hashes by.

Knows uint64 alone. Does not know what is drawn from the bits, or made up of them. Steele, Lea, Flood: Fast Splittable
Pseudorandom Number Generators, OOPSLA 2014; sampling/noise.py is the same in plain torch.
"""

from __future__ import annotations

import triton
import triton.language as tl

STEP = tl.constexpr(0x9E3779B97F4A7C15)
"""From one counter to the next."""
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def mixed(x):
    """The finalizer, of uint64."""
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)
