"""Counter-based Gumbel noise: a function of (seed, choice, position, token) and nothing else.

Knows integers and their hash. Does not know logits, requests, or what was drawn before; there is no state.

The hash is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) used
by counter: each (seed, choice, position) is mixed to a 64-bit key, and the generator that starts at this key
gives its i-th output to tokens 2i and 2i+1, 32 bits each. Integer arithmetic is exact, so every device makes
the same bits; the logarithms that follow may differ between devices in the last place.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_BELOW_ONE = 1.0 - 2.0**-24
"""The largest float32 below 1."""


def signed(value: int) -> int:
    """The int64 with the low 64 bits of `value`: seeds are unsigned, tensors are not."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def uniform(seed: Tensor, choice: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Uniforms in the open interval (0, 1), one per token.

    seed, choice, position: int64 [rows]. Returns float32 [rows, vocab]. 32 bits each, so small values, which
    decide a draw, keep their fine steps: the least is 2**-33.
    """
    counters = torch.arange(1, (vocab + 1) // 2 + 1, device=seed.device)
    words = mix_(_key(seed, choice, position)[:, None] + counters * signed(STEP))
    halves = words.view(torch.uint32).to(torch.float32)[:, :vocab]
    return halves.add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)


def gumbel(seed: Tensor, choice: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise, -log(-log(1-u)), finite everywhere (between -2.9 and 22.9).

    Arguments as `uniform`; returns float32 [rows, vocab].
    """
    return uniform(seed, choice, position, vocab).neg_().log1p_().neg_().log_().neg_()


def apart(choice: Tensor, position: Tensor, stream: int, start: Tensor) -> tuple[Tensor, Tensor]:
    """Choice and position of noise that nothing else is drawn with: one of the streams 1, 2..., begun anew at `start`.

    choice, position, start: int64 [rows], below 2**32 and 2**31.
    """
    return choice + (stream << 32), position + (start << 32)


def _key(seed: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """One 64-bit key per row; each word goes through the whole mixer before the next one joins."""
    key = mix_(seed + signed(STEP))
    for word in (choice, position):
        key = mix_((key ^ word) * signed(STEP) + 1)
    return key


def mix_(x: Tensor) -> Tensor:
    """SplitMix64's finalizer, in place: a bijection of int64 in which every input bit reaches every output bit."""
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        # The shift of a signed tensor drags the sign along; the mask makes it a logical one.
        x ^= (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if multiplier is not None:
            x *= signed(multiplier)
    return x
