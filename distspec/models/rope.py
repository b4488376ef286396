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


def rope_table(config: ModelConfig) -> Tensor:
    """Cosines and signed sines of every position: float32 [2, max_position, head_dim].

    The sine of the first half of a head is negated. Frequencies are computed in float32 as transformers does,
    since checkpoints were trained with that rounding.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequency = 1.0 / config.rope_theta**exponent
    if config.rope_scaling is not None:
        frequency = _scaled(frequency, config.rope_scaling)
    angle = torch.arange(config.max_position, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
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
