"""Draft models by the book: dense torch over a whole sequence, written from the papers and the published layouts.

Reads tensors by the names of each kind's own checkpoints. Shares no code with the models it is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Row = tuple[Tensor, Tensor, Tensor]
"""Hidden state [hidden], key and value [1, heads, dim] of a row."""


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def turn(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x: [rows, heads, dim], as complex numbers whose parts lie half a head apart."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), -1)


class Layer:
    """A decoder layer of a config.json tree; `at` begins the names of its tensors."""

    def __init__(self, tree: dict[str, Any], tensors: Tensors, at: str) -> None:
        self.tree, self.tensors, self.at = tree, tensors, at

    def heads(self, x: Tensor, which: str, positions: Tensor) -> Tensor:
        at = f"{self.at}self_attn.{which}"
        y = x @ self.tensors[f"{at}_proj.weight"].T + self.tensors.get(f"{at}_proj.bias", torch.zeros(1))
        y = y.view(len(x), -1, self.tree["head_dim"])
        if f"{at}_norm.weight" in self.tensors:
            y = norm(y, self.tensors[f"{at}_norm.weight"], self.tree["rms_norm_eps"])
        return y if which == "v" else turn(y, positions, self.tree["rope_theta"])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """seen: bool [queries, keys]."""
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        at = f"{self.at}self_attn.o_proj"
        return mixed @ self.tensors[f"{at}.weight"].T + self.tensors.get(f"{at}.bias", torch.zeros(1))

    def rest(self, x: Tensor) -> Tensor:
        get = lambda name: self.tensors[f"{self.at}{name}.weight"]  # noqa: E731
        y = norm(x, get("post_attention_layernorm"), self.tree["rms_norm_eps"])
        gate = y @ get("mlp.gate_proj").T
        return x + (gate * gate.sigmoid() * (y @ get("mlp.up_proj").T)) @ get("mlp.down_proj").T

    def causal(self, x: Tensor, read: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (self.heads(read, which, positions) for which in "qkv")
        return self.rest(x + self.attend(q, k, v, torch.ones(len(q), len(k)).tril().bool()))


class Fed:
    """EAGLE, EAGLE-3 or MTP. outer: embedding, norm and head of the target; tree and tensors: of its own layout."""

    def __init__(self, kind: str, tree: dict[str, Any], tensors: Tensors, outer: Tensors, eps: float) -> None:
        self.kind, self.tree, self.tensors, self.outer, self.eps = kind, tree, tensors, outer, eps
        self.embedding = tensors.get("embed_tokens.weight", outer["embedding"])
        self.prefix = f"model.layers.{tree['num_hidden_layers']}."
        at = {"eagle": "layers.0.", "eagle3": "midlayer.", "mtp": self.prefix}[kind]
        self.layer = Layer(tree, tensors, at)

    def enter(self, features: Tensor) -> Tensor:
        if self.kind == "eagle3":
            if self.tree.get("norm_before_fc"):
                features = norm(features, self.tensors["input_norm.weight"], self.tree["rms_norm_eps"])
            return features @ self.tensors["fc.weight"].T
        return norm(features, self.outer["norm"], self.eps)

    def inputs(self, tokens: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream that enters the layer, and what attention reads."""
        embedded, own = self.embedding[tokens], self.tree["rms_norm_eps"]
        if self.kind == "eagle":
            x = torch.cat((embedded, features), -1) @ self.tensors["fc.weight"].T
            x = x + self.tensors.get("fc.bias", torch.zeros(1))
            return x, x
        if self.kind == "eagle3":
            embedded = norm(embedded, self.tensors["midlayer.input_layernorm.weight"], own)
            normed = norm(features, self.tensors["midlayer.hidden_norm.weight"], own)
            return normed if self.tree.get("norm_before_residual") else features, torch.cat((embedded, normed), -1)
        get = lambda name: self.tensors[f"{self.prefix}{name}.weight"]  # noqa: E731
        both = torch.cat((norm(embedded, get("enorm"), own), norm(features, get("hnorm"), own)), -1)
        x = both @ get("eh_proj").T
        return x, norm(x, get("input_layernorm"), own)

    def leave(self, hidden: Tensor) -> Tensor:
        """What of a layer's output goes on."""
        if self.tree.get("norm_output"):
            return norm(hidden, self.tensors["norm.weight"], self.tree["rms_norm_eps"])
        return hidden

    def forward(self, tokens: list[int], features: Tensor) -> Tensor:
        """Hidden states of a whole sequence of rows, at positions 0, 1..."""
        return self.leave(self.layer.causal(*self.inputs(tokens, features), torch.arange(len(tokens))))

    def row(self, token: int, feature: Tensor, position: int, above: Sequence[Row]) -> Row:
        """One row that sees those above it."""
        x, read = self.inputs([token], feature[None])
        q, k, v = (self.layer.heads(read, which, torch.tensor([position])) for which in "qkv")
        keys, values = (torch.cat([*(row[i] for row in above), own]) for i, own in ((1, k), (2, v)))
        mixed = self.layer.attend(q, keys, values, torch.ones(1, len(keys)).bool())
        return self.leave(self.layer.rest(x + mixed))[0], k, v

    def logits(self, hidden: Tensor) -> Tensor:
        """Over the target's vocabulary, -inf where the head has no token."""
        if self.kind == "eagle":
            return hidden @ self.outer["head"].T
        if self.kind == "mtp":
            own = self.tensors[f"{self.prefix}shared_head.norm.weight"]
            return norm(hidden, own, self.tree["rms_norm_eps"]) @ self.outer["head"].T
        if not self.tree.get("norm_output"):
            hidden = norm(hidden, self.tensors["norm.weight"], self.tree["rms_norm_eps"])
        return spread(hidden @ self.tensors["lm_head.weight"].T, self.tensors, len(self.outer["head"]))

    def next(self, tokens: list[int], features: Tensor, path: list[int]) -> Tensor:
        """Logits after a text (the target's features beside it, as in a DraftRow) and drafted tokens below it, which
        read the hidden states of the model's own rows."""
        rows, fed = tokens[1:], self.enter(features[1:])
        hidden = self.forward(rows, fed)
        for token in path:
            rows, fed = [*rows, token], torch.cat((fed, hidden[-1:]))
            hidden = self.forward(rows, fed)
        return self.logits(hidden[-1:])[0]


def spread(logits: Tensor, tensors: Tensors, vocab: int) -> Tensor:
    """Row by row and token by token: the draft model's token i is the target's i + d2t[i]."""
    if "d2t" not in tensors:
        return logits
    whole = torch.full((len(logits), vocab), -torch.inf)
    for i, offset in enumerate(tensors["d2t"].tolist()):
        whole[:, i + offset] = logits[:, i]
    return whole


def block(tree: dict[str, Any], tensors: Tensors, outer: Tensors, tokens: list[int], features: Tensor) -> Tensor:
    """DFlash: logits [block_size - 1, vocab] of the tokens that follow a text, features beside it as in a DraftRow."""
    own, count, base = tree["rms_norm_eps"], tree["block_size"], len(tokens) - 1
    context = norm(features[1:] @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], own)
    mask = tree["dflash_config"]["mask_token_id"]
    x = tensors.get("embed_tokens.weight", outer["embedding"])[[tokens[-1], *[mask] * (count - 1)]]
    before, within = torch.arange(base), torch.arange(base, base + count)
    for i in range(tree["num_hidden_layers"]):
        layer = Layer(tree, tensors, f"layers.{i}.")
        read = norm(x, tensors[f"layers.{i}.input_layernorm.weight"], own)
        k, v = (torch.cat((layer.heads(context, w, before), layer.heads(read, w, within))) for w in "kv")
        x = layer.rest(x + layer.attend(layer.heads(read, "q", within), k, v, torch.ones(count, len(k)).bool()))
    hidden = norm(x, tensors["norm.weight"], own)[1:]
    return spread(hidden @ tensors.get("lm_head.weight", outer["head"]).T, tensors, len(outer["head"]))
