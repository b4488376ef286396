"""EAGLE-3: one decoder layer over features of a low, a middle and a high layer of the target, with a head of its own.

Knows the arithmetic and the parameters. Does not know files, pages or trees.

EAGLE-3 (arXiv 2503.01840). Attention reads the normed embedding of the token beside the normed feature; the residual
stream is the feature. The head may cover the frequent tokens only.
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
from distspec.models.draft import DraftHead, Target
from distspec.models.llama import layer_parts, make_layer, rms
from distspec.models.parts import Parts
from distspec.models.product import Matrix
from distspec.models.rope import rope_table, rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """layer: shape of the layer; vocab_size is the target's, hidden_size its own. taps: of the target.

    draft_vocab_size: tokens of its head. own_embedding: it brings its embeddings, else the target's are used.
    norm_before_residual: the residual stream begins with the normed feature. norm_before_fc: the target's features are
    normed. norm_output: the normed output is what its next step reads (EAGLE-3.1). The last three are variants of the
    `speculators` library.
    """

    kind: ClassVar[str] = "eagle3"
    layer: ModelConfig
    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    own_embedding: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False

    @property
    def reduced(self) -> bool:
        return self.draft_vocab_size < self.layer.vocab_size

    def parameters(self) -> dict[str, Parts]:
        """As llama.parameters, in the names of the `speculators` library."""
        hidden, read = self.layer.hidden_size, len(self.taps) * self.target_hidden_size
        table: dict[str, Parts] = {"fc": {"fc.weight": (hidden, read)}}
        if self.norm_before_fc:
            table["input_norm"] = {"input_norm.weight": (read,)}
        if self.own_embedding:
            table["embedding"] = {"embed_tokens.weight": (self.layer.vocab_size, hidden)}
        layer = layer_parts(self.layer, "layers.0", inputs=2 * hidden)
        table |= {f"layer.{name}": parts for name, parts in layer.items()}
        table["hidden_norm"] = {"layers.0.hidden_norm.weight": (hidden,)}
        table["norm"] = {"norm.weight": (hidden,)}
        table["head"] = {"lm_head.weight": (self.draft_vocab_size, hidden)}
        return table

    def make(self, weights: Mapping[str, Tensor], target: Target) -> Eagle3:
        return Eagle3(self, weights, target)


class Eagle3:
    """See FeatureModel."""

    def __init__(self, settings: Eagle3Config, weights: Mapping[str, Tensor], target: Target) -> None:
        self.settings = settings
        self.config = settings.layer
        self.dtype = target.embedding.dtype
        self.taps = settings.taps
        self.width = len(settings.taps) * settings.target_hidden_size
        self.weights = dict(weights)
        self._embedding = weights["embedding"] if settings.own_embedding else target.embedding
        self._fc = Matrix(weights["fc"])
        self._layer = make_layer(self.config, weights, "layer.")
        self._rope = rope_table(self.config).to(target.embedding.device, self.dtype)
        self._head = DraftHead(weights["head"], weights.get("ids"), self.config.vocab_size)

    def enter(self, features: Tensor) -> Tensor:
        if self.settings.norm_before_fc:
            features = rms(features, self.weights["input_norm"], self.config)
        return self._fc(features)

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens, positions: int64 [rows]; features: [rows, hidden_size]. Returns hidden [rows, hidden_size]."""
        embedded = rms(F.embedding(tokens, self._embedding), self.weights["layer.attention_norm"], self.config)
        normed = rms(features, self.weights["hidden_norm"], self.config)
        x = normed if self.settings.norm_before_residual else features
        read = torch.cat((embedded, normed), dim=-1)
        hidden = self._layer(0, x, read, rotation(self._rope, positions), attend)
        return rms(hidden, self.weights["norm"], self.config) if self.settings.norm_output else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size], of forward. Returns float32 [rows, vocab_size] of the target's ids."""
        return self._head(hidden if self.settings.norm_output else rms(hidden, self.weights["norm"], self.config))
