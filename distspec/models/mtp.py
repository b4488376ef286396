"""Next-token prediction: the further layer with which a target was trained to look one token ahead.

Knows the arithmetic and the parameters. Does not know files, pages or trees.

DeepSeek-V3 (arXiv 2412.19437, section 2.2), with the decoder layer of our families. Embedding and head are the
target's. One layer drafts several tokens by reading its own output; where that and the target's hidden state are
taken follows vLLM: behind the target's final norm, before its own.
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
class MtpConfig:
    """layer: shape of the layer, with the target's hidden size and vocabulary. index: its number, which follows those
    of the target's layers."""

    kind: ClassVar[str] = "mtp"
    layer: ModelConfig
    index: int

    @property
    def taps(self) -> tuple[int, ...]:
        """What enters the target's final norm."""
        return (self.index,)

    def parameters(self) -> dict[str, Parts]:
        """As llama.parameters, in the names of DeepSeek's checkpoints."""
        hidden, at = self.layer.hidden_size, f"model.layers.{self.index}"
        table: dict[str, Parts] = {
            "token_norm": {f"{at}.enorm.weight": (hidden,)},
            "hidden_norm": {f"{at}.hnorm.weight": (hidden,)},
            "fc": {f"{at}.eh_proj.weight": (hidden, 2 * hidden)},
            "norm": {f"{at}.shared_head.norm.weight": (hidden,)},
        }
        return table | {f"layer.{name}": parts for name, parts in layer_parts(self.layer, at).items()}

    def make(self, weights: Mapping[str, Tensor], target: Target) -> Mtp:
        return Mtp(self, weights, target)


class Mtp:
    """See FeatureModel."""

    def __init__(self, settings: MtpConfig, weights: Mapping[str, Tensor], target: Target) -> None:
        self.settings = settings
        self.config = settings.layer
        self.dtype = target.embedding.dtype
        self.taps = settings.taps
        self.width = target.config.hidden_size
        self.weights = dict(weights)
        self._target = target
        self._fc = Matrix(weights["fc"])
        self._layer = make_layer(self.config, weights, "layer.")
        self._rope = rope_table(self.config).to(target.embedding.device, self.dtype)

    def enter(self, features: Tensor) -> Tensor:
        """Through the target's final norm."""
        return rms(features, self._target.norm, self._target.config)

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        embedded = rms(F.embedding(tokens, self._target.embedding), self.weights["token_norm"], self.config)
        x = self._fc(torch.cat((embedded, rms(features, self.weights["hidden_norm"], self.config)), dim=-1))
        read = rms(x, self.weights["layer.attention_norm"], self.config)
        return self._layer(0, x, read, rotation(self._rope, positions), attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._target.head(rms(hidden, self.weights["norm"], self.config))
