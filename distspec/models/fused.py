"""The Llama family on a GPU in half precision: llama.Layer in four products, one kernel between, and attention.

Knows which kernel does what of a layer. Does not know how kernels work, pages beyond what Paged shows, or sequences.
Norms are part of the products that read them, SiLU x up and residuals part of the products before (kernels/linear.py),
and rotary writes keys and values to their pages, so that a step at few rows has little but weights to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from distspec.kernels.linear import Norm
from distspec.kernels.norm import rms_norm
from distspec.kernels.product import Product
from distspec.kernels.rope import HeadNorms, rope_and_write
from distspec.models.base import Paged, Taps
from distspec.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One decoder layer, the norm of what its attention reads included. norms: of heads, where there are any."""

    qkv: Product
    output: Product
    gate_up: Product
    down: Product
    norms: HeadNorms | None

    def __call__(self, index: int, x: Tensor, table: Tensor, positions: Tensor, attend: Paged) -> Tensor:
        """x: residual stream [rows, hidden_size], which may be written to; table: a llama.rope_table. Returns the
        stream that leaves the layer."""
        keys, values = attend.layers[index]
        q = rope_and_write(self.qkv(x), table, positions, attend.write, keys, values, self.norms)
        x = self.output(attend.read(index, q), x)
        return self.down(self.gate_up(x), x)


class FusedStack:
    """All layers and the final norm. weights: of llama.parameters; rope: llama.rope_table on their device."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], rope: Tensor) -> None:
        self._config = config
        self._embedding = weights["embedding"]
        self._norm = weights["norm"]
        self._rope = rope
        self._layers = [_layer(config, weights, f"layers.{i}.") for i in range(config.num_layers)]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Paged, taps: Taps | None = None) -> Tensor:
        """See Model.forward."""
        x = F.embedding(tokens, self._embedding)
        for i, layer in enumerate(self._layers):
            _tap(taps, i, x)
            x = layer(i, x, self._rope, positions, attend)
        _tap(taps, len(self._layers), x)
        return rms_norm(x, self._norm, self._config.rms_eps)


def _tap(taps: Taps | None, index: int, x: Tensor) -> None:
    if taps is not None and index in taps.layers:
        taps.take(index, x.clone())  # layers may write to their stream


def _layer(config: ModelConfig, weights: Mapping[str, Tensor], prefix: str) -> FusedLayer:
    def norm(name: str) -> Norm:
        return Norm(weights[prefix + name], config.rms_eps)

    norms = None
    if config.qk_norm:
        norms = HeadNorms(weights[f"{prefix}query_norm"], weights[f"{prefix}key_norm"], config.rms_eps)
    return FusedLayer(
        qkv=Product(weights[f"{prefix}qkv"], weights.get(f"{prefix}qkv_bias"), norm=norm("attention_norm")),
        output=Product(weights[f"{prefix}output"], weights.get(f"{prefix}output_bias")),
        gate_up=Product(weights[f"{prefix}gate_up"], norm=norm("mlp_norm"), gated=True),
        down=Product(weights[f"{prefix}down"]),
        norms=norms,
    )
