"""What draft models that read the target's features are to a drafter, and what they borrow of their target.

Knows the calls, the target's outer parts and a reduced vocabulary. Does not know architectures, files, pages or trees.

A row of such a model is a token and the feature of the position before it, the position that drew the token. So the
first token of a text has no row, and the row of the token at position p of the text stands at position p - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from distspec.models.base import Attend
from distspec.models.config import ModelConfig
from distspec.models.llama import Head, Llama, layer_parts, make_layer, rms
from distspec.models.parts import Parts
from distspec.models.product import Matrix
from distspec.models.rope import rope_table


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a target that draft models share. norm: the final one. dtype and device are the embedding's."""

    config: ModelConfig
    embedding: Tensor
    norm: Tensor
    head: Head

    @classmethod
    def of(cls, model: Llama) -> Target:
        """Of a model that is loaded, whose memory is shared."""
        return cls(model.config, model.embedding, model.norm, model.head)


class DraftHead:
    """Logits over the target's vocabulary from a head over some of its tokens.

    weight: [tokens, hidden_size]. ids: int64 [tokens], the target's id of each; None: they are the target's.
    """

    def __init__(self, weight: Tensor, ids: Tensor | None, vocab_size: int) -> None:
        self._head = Head(weight)
        self._ids = ids
        self._vocab_size = vocab_size

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size]. Returns float32 [rows, vocab_size], -inf for tokens that it does not know."""
        logits = self._head(hidden)
        if self._ids is None:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        return whole.index_copy_(1, self._ids, logits)


class FeatureModel(Protocol):
    """One layer fed with tokens and features, its own hidden states being the features of its next step: EAGLE,
    EAGLE-3, MTP.

    config: of its layer; vocab_size is the target's. taps: the target's features that it reads, see models.Taps; width:
    of all of them, len(taps) * the target's hidden_size. weights: its own parameters, and `ids` where it has a reduced
    vocabulary, see DraftHead.
    """

    config: ModelConfig
    dtype: torch.dtype
    taps: tuple[int, ...]
    width: int
    weights: dict[str, Tensor]

    def enter(self, features: Tensor) -> Tensor:
        """The target's features [rows, width] as `forward` takes them: [rows, hidden_size]."""
        ...

    def forward(self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens, positions: int64 [rows]; features: [rows, hidden_size]. Returns hidden [rows, hidden_size], which
        are the features of the rows of the next tokens."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size] as forward returns it. Returns float32 [rows, vocab_size] of the target's ids."""
        ...


class Continuation:
    """What EAGLE and MTP are built on: one decoder layer, as wide as the target, that goes on from what leaves the
    target's final norm. `fc` makes one vector of a token's embedding and that feature.

    config, dtype, taps, width, weights and enter as of a FeatureModel; forward and logits are the subclass's.
    """

    def __init__(
        self, config: ModelConfig, taps: tuple[int, ...], weights: Mapping[str, Tensor], target: Target
    ) -> None:
        """taps: what enters the target's final norm."""
        self.config = config
        self.dtype = target.embedding.dtype
        self.taps = taps
        self.width = target.config.hidden_size
        self.weights = dict(weights)
        self._target = target
        self._fc = Matrix(weights["fc"], weights.get("fc_bias"))
        self._layer = make_layer(config, weights, "layer.")
        self._rope = rope_table(config).to(target.embedding.device, self.dtype)

    @staticmethod
    def parameters(config: ModelConfig, fc: str, layer: str) -> dict[str, Parts]:
        """Those that every such model has, by the names of a checkpoint for `fc` and the layer."""
        table: dict[str, Parts] = {"fc": {fc: (config.hidden_size, 2 * config.hidden_size)}}
        return table | {f"layer.{name}": parts for name, parts in layer_parts(config, layer).items()}

    def enter(self, features: Tensor) -> Tensor:
        """Through the target's final norm."""
        return rms(features, self._target.norm, self._target.config)

    def _embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._target.embedding)
