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
from torch import Tensor

from distspec.models.base import Attend
from distspec.models.config import ModelConfig
from distspec.models.draft import Continuation, Target
from distspec.models.llama import rms
from distspec.models.parts import Parts
from distspec.models.rope import rotation


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
        norms: dict[str, Parts] = {
            "token_norm": {f"{at}.enorm.weight": (hidden,)},
            "hidden_norm": {f"{at}.hnorm.weight": (hidden,)},
            "norm": {f"{at}.shared_head.norm.weight": (hidden,)},
        }
        return norms | Continuation.parameters(self.layer, f"{at}.eh_proj.weight", at)

    def make(self, weights: Mapping[str, Tensor], target: Target) -> Mtp:
        return Mtp(self, weights, target)


class Mtp(Continuation):
    """See FeatureModel."""

    def __init__(self, settings: MtpConfig, weights: Mapping[str, Tensor], target: Target) -> None:
        super().__init__(settings.layer, settings.taps, weights, target)
        self.settings = settings

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens, positions: int64 [rows]; features: [rows, hidden_size]. Returns hidden [rows, hidden_size]."""
        token = rms(self._embed(tokens), self.weights["token_norm"], self.config)
        x = self._fc(torch.cat((token, rms(features, self.weights["hidden_norm"], self.config)), dim=-1))
        read = rms(x, self.weights["layer.attention_norm"], self.config)
        return self._layer(0, x, read, rotation(self._rope, positions), attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size], as forward returns it. Returns float32 [rows, vocab_size]."""
        return self._target.head(rms(hidden, self.weights["norm"], self.config))
