"""Rotary embedding: positions as angles by which pairs of a head's numbers are turned (RoFormer, arXiv 2104.09864).

Knows tables of cosines and sines, and how contexts longer than those of training are reached. Does not know layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distspec.models.config import ModelConfig, RopeScaling


def rotate(heads: Tensor, rope: Tensor) -> Tensor:
    """Rotary embedding of heads [rows, any number, head_dim]; rope: of the rows, as `rotation` gives it."""
    cos, sin = rope
    # (a, b) -> (a cos - b sin, b cos + a sin): the minus is in the table, so a roll swaps the halves.
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def rotation(table: Tensor, positions: Tensor) -> Tensor:
    """Cosines and signed sines of rows, from a `rope_table`: [2, rows, 1, head_dim]."""
    return table[:, positions].unsqueeze(2)


def halved(heads: Tensor) -> Tensor:
    """Heads whose numbers 2i and 2i+1 make a pair, as in DeepSeek's checkpoints, with those of a pair half a head apart
    instead, as `rotate` has them."""
    return heads.view(*heads.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


def rope_table(config: ModelConfig) -> Tensor:
    """Cosines and signed sines of every position: float32 [2, max_position, rope_dim].

    The sine of the first half of a head is negated. Frequencies are computed in float32 as transformers does,
    since checkpoints were trained with that rounding.
    """
    exponent = torch.arange(0, config.rope_dim, 2, dtype=torch.float32) / config.rope_dim
    frequency, strength = 1.0 / config.rope_theta**exponent, 1.0
    if (scaling := config.rope_scaling) is not None and scaling.kind == "yarn":
        frequency, strength = _yarn(frequency, scaling, config.rope_theta), _yarn_strength(scaling)
    elif scaling is not None:
        frequency = _scaled(frequency, scaling)
    angle = torch.arange(config.max_position, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos() * strength, angle.sin() * strength
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))


def _scaled(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, and between them interpolated (Llama 3.1)."""
    slow = frequency / scaling.factor
    if scaling.kind == "linear":
        return slow
    turns = scaling.original_max_position * frequency / (2 * math.pi)  # full turns within the first context
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0, 1)
    return (1 - share) * slow + share * frequency


def _yarn(frequency: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Frequencies with more than beta_fast turns within the first context are kept, those with less than beta_slow are
    stretched, and between them goes a ramp over whole dimensions (arXiv 2309.00071, section 3.2)."""
    count = len(frequency)

    def dimension(turns: float) -> float:
        """The one that makes so many."""
        return count * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / math.log(theta)

    first = max(0, math.floor(dimension(scaling.beta_fast)))
    last = min(2 * count - 1, math.ceil(dimension(scaling.beta_slow)))
    share = (torch.arange(count, dtype=torch.float32) - first) / max(last - first, 0.001)
    share = share.clamp(0, 1)
    return share * (frequency / scaling.factor) + (1 - share) * frequency


def _yarn_strength(scaling: RopeScaling) -> float:
    """By how much queries and keys are longer, each. DeepSeek's models state two parts of it, of which the one for all
    dimensions is applied to scores: see `score_growth`."""
    if scaling.mscale and scaling.mscale_all_dim:
        return _growth(scaling.factor, scaling.mscale) / _growth(scaling.factor, scaling.mscale_all_dim)
    return _growth(scaling.factor, 1.0)


def score_growth(scaling: RopeScaling | None) -> float:
    """By how much scores of all dimensions, rotated or not, are larger (DeepSeek's `mscale_all_dim`)."""
    return _growth(scaling.factor, scaling.mscale_all_dim) ** 2 if scaling and scaling.mscale_all_dim else 1.0


def _growth(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
