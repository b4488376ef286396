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
from torch import Tensor

from distspec.models.base import Attend
from distspec.models.config import ModelConfig
from distspec.models.draft import Continuation, Target
from distspec.models.parts import Parts
from distspec.models.rope import rotation


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
        table = Continuation.parameters(self.layer, "fc.weight", "layers.0")
        del table["layer.attention_norm"]
        return table | ({"fc_bias": {"fc.bias": (self.layer.hidden_size,)}} if self.fusion_bias else {})

    def make(self, weights: Mapping[str, Tensor], target: Target) -> Eagle:
        return Eagle(self, weights, target)


class Eagle(Continuation):
    """See FeatureModel."""

    def __init__(self, settings: EagleConfig, weights: Mapping[str, Tensor], target: Target) -> None:
        super().__init__(settings.layer, settings.taps, weights, target)
        self.settings = settings

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens, positions: int64 [rows]; features: [rows, hidden_size]. Returns hidden [rows, hidden_size]."""
        x = self._fc(torch.cat((self._embed(tokens), features), dim=-1))
        return self._layer(0, x, x, rotation(self._rope, positions), attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size], as forward returns it. Returns float32 [rows, vocab_size]."""
        return self._target.head(hidden)
