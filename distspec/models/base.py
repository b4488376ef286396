"""What the engine and a model ask of each other.

Knows the two calls. Does not know architectures, weights, pages or backends.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from distspec.models.config import ModelConfig


class Attend(Protocol):
    """Attention of one step, supplied by the engine: the only thing a model does not compute itself."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v to the pages, then attend from each row.

        q: [rows, num_heads, head_dim], k and v: [rows, num_kv_heads, head_dim], in the model's dtype, rotary
        applied, unscaled, possibly strided views. Returns [rows, num_heads * head_dim].
        """
        ...


class Model(Protocol):
    """A decoder over rows: it knows nothing of sequences, which only `attend` and `positions` tell apart.

    dtype: of weights, activations, and of the keys and values it hands to `attend`.
    """

    config: ModelConfig
    dtype: torch.dtype

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens, positions: int64 [rows], positions below config.max_position. Returns hidden [rows, hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size] as forward returns it. Returns float32 [rows, vocab_size]."""
        ...
