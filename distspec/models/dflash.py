"""DFlash: a few layers that fill in a whole block of tokens at once.

Knows the arithmetic and the parameters. Does not know files, pages or drafters.

DFlash (block diffusion, arXiv 2602.06036). The block is the last token of the text and mask tokens after it. Its rows
see each other both ways, and keys and values that every layer makes of the target's features at the positions before
the block, for which there are no queries. The logits of a mask's row are those of its own position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from distspec.models.base import Attend
from distspec.models.config import ModelConfig
from distspec.models.draft import DraftHead, Target
from distspec.models.llama import layer_parts, make_layer, rms
from distspec.models.parts import Parts
from distspec.models.product import Matrix
from distspec.models.rope import rope_table, rotate, rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class DflashConfig:
    """layer: shape of its layers, all of them, with the target's hidden size and vocabulary. taps: of the target.

    block_size: rows of a block. mask_token: id of what stands where a token is to be filled in. draft_vocab_size:
    tokens of its own head; None: it uses the target's. own_embedding: it brings its embeddings.
    """

    kind: ClassVar[str] = "dflash"
    layer: ModelConfig
    taps: tuple[int, ...]
    block_size: int
    mask_token: int
    draft_vocab_size: int | None = None
    own_embedding: bool = False

    @property
    def reduced(self) -> bool:
        return self.draft_vocab_size is not None and self.draft_vocab_size < self.layer.vocab_size

    def parameters(self) -> dict[str, Parts]:
        """As llama.parameters, in the names of z-lab's checkpoints."""
        hidden = self.layer.hidden_size
        table: dict[str, Parts] = {"fc": {"fc.weight": (hidden, len(self.taps) * hidden)}}
        table["hidden_norm"] = {"hidden_norm.weight": (hidden,)}
        if self.own_embedding:
            table["embedding"] = {"embed_tokens.weight": (self.layer.vocab_size, hidden)}
        for i in range(self.layer.num_layers):
            parts = layer_parts(self.layer, f"layers.{i}")
            table |= {f"layers.{i}.{name}": part for name, part in parts.items()}
        table["norm"] = {"norm.weight": (hidden,)}
        if self.draft_vocab_size is not None:
            table["head"] = {"lm_head.weight": (self.draft_vocab_size, hidden)}
        return table

    def make(self, weights: Mapping[str, Tensor], target: Target) -> Dflash:
        return Dflash(self, weights, target)


class Dflash:
    """config, dtype, taps, width and weights as of a FeatureModel."""

    def __init__(self, settings: DflashConfig, weights: Mapping[str, Tensor], target: Target) -> None:
        self.settings = settings
        self.config = config = settings.layer
        self.dtype = target.embedding.dtype
        self.taps = settings.taps
        self.width = len(settings.taps) * config.hidden_size
        self.weights = dict(weights)
        self._embedding = weights["embedding"] if settings.own_embedding else target.embedding
        self._fc = Matrix(weights["fc"])
        self._layers = [make_layer(config, weights, f"layers.{i}.") for i in range(config.num_layers)]
        self._context = [self._keys_values(i) for i in range(config.num_layers)]
        self._rope = rope_table(config).to(target.embedding.device, self.dtype)
        self._head = target.head if "head" not in weights else self._own_head()

    def enter(self, features: Tensor) -> Tensor:
        """The target's features [rows, width] as `context` takes them: [rows, hidden_size]."""
        return rms(self._fc(features), self.weights["hidden_norm"], self.config)

    def context(self, layer: int, entered: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer at positions of the text, each [rows, num_kv_heads, head_dim].

        entered: [rows, hidden_size], of features at these positions: int64 [rows].
        """
        shape = (len(entered), self.config.num_kv_heads, self.config.head_dim)
        keys, values = (part.reshape(shape) for part in self._context[layer](entered).chunk(2, dim=-1))
        norm = self.weights.get(f"layers.{layer}.key_norm")
        keys = keys if norm is None else rms(keys, norm, self.config)
        return rotate(keys, rotation(self._rope, positions)), values

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens, positions: int64 [rows], of whole blocks. Returns hidden [rows, hidden_size]."""
        x = F.embedding(tokens, self._embedding)
        rope = rotation(self._rope, positions)
        for i, layer in enumerate(self._layers):
            x = layer(i, x, rms(x, self.weights[f"layers.{i}.attention_norm"], self.config), rope, attend)
        return rms(x, self.weights["norm"], self.config)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size]. Returns float32 [rows, vocab_size] of the target's ids."""
        return self._head(hidden)

    def _keys_values(self, layer: int) -> Matrix:
        """The part of a layer's q, k, v that the context needs."""
        skipped = self.config.num_heads * self.config.head_dim
        bias = self.weights.get(f"layers.{layer}.qkv_bias")
        return Matrix(self.weights[f"layers.{layer}.qkv"][skipped:], None if bias is None else bias[skipped:])

    def _own_head(self) -> DraftHead:
        return DraftHead(self.weights["head"], self.weights.get("ids"), self.config.vocab_size)
