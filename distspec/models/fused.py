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
from distspec.kernels.product import Adder, Reader, Stream
from distspec.kernels.rope import HeadNorms, rope_and_write
from distspec.models.base import Paged, Taps
from distspec.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One decoder layer, the norm of what its attention reads included. norms: of heads, where there are any."""

    qkv: Reader
    output: Adder
    gate_up: Reader
    down: Adder
    norms: HeadNorms | None

    def __call__(self, index: int, stream: Stream, table: Tensor, positions: Tensor, attend: Paged) -> Stream:
        """table: a rope.rope_table. Returns the stream that leaves the layer, maybe in the memory of the old one."""
        keys, values = attend.layers[index]
        q = rope_and_write(self.qkv(stream), table, positions, attend.write, keys, values, self.norms)
        stream = self.output(attend.read(index, q), stream)
        return self.down(self.gate_up(stream), stream)


class FusedStack:
    """All layers and the final norm. weights: of llama.parameters; rope: rope.rope_table on their device."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], rope: Tensor) -> None:
        self._embedding = weights["embedding"]
        self._rope = rope
        names = [*(f"layers.{i}.attention_norm" for i in range(config.num_layers)), "norm"]
        norms = [Norm(weights[name], config.rms_eps) for name in names]
        self._norm = norms[-1]
        self._layers = [
            _layer(config, weights, f"layers.{i}.", norms[i], norms[i + 1]) for i in range(config.num_layers)
        ]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Paged, taps: Taps | None = None) -> Tensor:
        """See Model.forward."""
        stream = Stream(F.embedding(tokens, self._embedding))
        for i, layer in enumerate(self._layers):
            _tap(taps, i, stream)
            stream = layer(i, stream, self._rope, positions, attend)
        _tap(taps, len(self._layers), stream)
        return rms_norm(stream.x, self._norm.weight, self._norm.eps)


def _tap(taps: Taps | None, index: int, stream: Stream) -> None:
    if taps is not None and index in taps.layers:
        taps.take(index, stream.x.clone())  # layers may write to their stream


def _layer(config: ModelConfig, weights: Mapping[str, Tensor], prefix: str, before: Norm, behind: Norm) -> FusedLayer:
    """before, behind: the norms of what attention reads, of this layer and of the next."""
    norms, middle = None, Norm(weights[f"{prefix}mlp_norm"], config.rms_eps)
    if config.qk_norm:
        norms = HeadNorms(weights[f"{prefix}query_norm"], weights[f"{prefix}key_norm"], config.rms_eps)
    return FusedLayer(
        qkv=Reader(weights[f"{prefix}qkv"], before, weights.get(f"{prefix}qkv_bias")),
        output=Adder(weights[f"{prefix}output"], middle, weights.get(f"{prefix}output_bias")),
        gate_up=Reader(weights[f"{prefix}gate_up"], middle, gated=True),
        down=Adder(weights[f"{prefix}down"], behind),
        norms=norms,
    )
