"""What the engine and a model ask of each other.

Knows the two calls and what may be read off in between. Does not know architectures, weights, pages or backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from distspec.models.config import ModelConfig


class Attend(Protocol):
    """Attention of one step, supplied by the engine: the only thing a model does not compute itself."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v to the pages, then attend from each row.

        q: [rows, num_heads, head_dim], k and v: [rows, num_kv_heads, head_dim], in the model's dtype, rotary
        applied, unscaled, possibly strided views. Returns [rows, num_heads * head_dim]. Of latents v is the first
        numbers of k, and results have as many.
        """
        ...


@dataclass(frozen=True, slots=True)
class Paged:
    """An `Attend` over pages, which shows where they are: a model whose kernels write k and v themselves does so, and
    then only reads.

    layers: keys and values of each layer, [locations, kv_heads, head_dim]. write: int64 [rows], the location of each
    row's own. read(layer, q): attends from each row to what lies there.
    """

    layers: Sequence[tuple[Tensor, Tensor]]
    write: Tensor
    read: Callable[[int, Tensor], Tensor]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See Attend."""
        keys, values = self.layers[layer]
        keys.index_copy_(0, self.write, k)
        values.index_copy_(0, self.write, v)
        return self.read(layer, q)


class Taps:
    """Reads features off one forward: the residual stream where it enters chosen layers, as EAGLE-3 draws them from a
    low, a middle and a high layer (arXiv 2503.01840).

    layers: i for what enters layer i, num_layers for what enters the final norm; in any order, repeats allowed.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._found: dict[int, Tensor] = {}

    def take(self, layer: int, stream: Tensor) -> None:
        """Called by the model before each layer and before the final norm. stream: [rows, hidden_size], which the
        model does not write to afterwards."""
        if layer in self.layers:
            self._found[layer] = stream

    def features(self) -> Tensor:
        """[rows, len(layers) * hidden_size] of the model's dtype, the taps of a row one after the other."""
        return torch.cat([self._found[layer] for layer in self.layers], dim=-1)


class Model(Protocol):
    """A decoder over rows: it knows nothing of sequences, which only `attend` and `positions` tell apart.

    dtype: of weights, activations, and of the keys and values it hands to `attend`.
    """

    config: ModelConfig
    dtype: torch.dtype

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Taps | None = None) -> Tensor:
        """tokens, positions: int64 [rows], positions below config.max_position. Returns hidden [rows, hidden_size];
        taps are given what they ask for on the way."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size] as forward returns it. Returns float32 [rows, vocab_size]."""
        ...
