"""EAGLE: one decoder layer that goes on from the target's last hidden state and the token drawn from it.

Knows the arithmetic and the parameters. Does not know files, pages or trees.

EAGLE (arXiv 2401.15077); EAGLE-2 (arXiv 2406.16858) is the same model with dynamic trees. The layer has no input norm,
and its output goes to the target's head as it is: it stands for what comes out of the target's final norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from distspec.models.base import Attend
from distspec.models.config import ModelConfig
from distspec.models.draft import Target
from distspec.models.llama import Parts, layer_parts, make_layer, rms, rope_table, rotation
from distspec.models.product import Matrix


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """layer: shape of the layer, with the target's hidden size and vocabulary. taps: what enters the target's final
    norm. fusion_bias: `fc` has a bias."""

    kind: ClassVar[str] = "eagle"
    layer: ModelConfig
    taps: tuple[int, ...]
    fusion_bias: bool = False

    def parameters(self) -> dict[str, Parts]:
        """As llama.parameters, in the names of EAGLE's own checkpoints."""
        hidden = self.layer.hidden_size
        table: dict[str, Parts] = {"fc": {"fc.weight": (hidden, 2 * hidden)}}
        if self.fusion_bias:
            table["fc_bias"] = {"fc.bias": (hidden,)}
        layer = {f"layer.{name}": parts for name, parts in layer_parts(self.layer, "layers.0").items()}
        del layer["layer.attention_norm"]
        return table | layer

    def make(self, weights: Mapping[str, Tensor], target: Target) -> Eagle:
        return Eagle(self, weights, target)


class Eagle:
    """See FeatureModel."""

    def __init__(self, settings: EagleConfig, weights: Mapping[str, Tensor], target: Target) -> None:
        self.settings = settings
        self.config = settings.layer
        self.dtype = target.embedding.dtype
        self.taps = settings.taps
        self.width = target.config.hidden_size
        self.weights = dict(weights)
        self._target = target
        self._fc = Matrix(weights["fc"], weights.get("fc_bias"))
        self._layer = make_layer(self.config, weights, "layer.")
        self._rope = rope_table(self.config).to(target.embedding.device, self.dtype)

    def enter(self, features: Tensor) -> Tensor:
        """Through the target's final norm."""
        return rms(features, self._target.norm, self._target.config)

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self._fc(torch.cat((F.embedding(tokens, self._target.embedding), features), dim=-1))
        return self._layer(0, x, x, rotation(self._rope, positions), attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._target.head(hidden)
