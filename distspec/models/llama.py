"""The Llama family: Llama, Mistral without a window, Qwen2, Qwen3, and DeepSeek as long as no layer has experts.

Knows the arithmetic of one forward and how checkpoint tensors make up its matrices. Does not know files,
pages, sequences, or how attention is computed: `attend` does that. Matrices that read the same input are one
(q, k, v; gate and up), since at a handful of rows a step is bound by the number of operations on a GPU and by
their overhead on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from distspec.models.base import Attend, Paged, Taps
from distspec.models.config import Latent, ModelConfig
from distspec.models.latent import LatentAttention, latent_parts
from distspec.models.parts import Parts
from distspec.models.product import Matrix
from distspec.models.rope import rope_table, rotate, rotation

if TYPE_CHECKING:
    from distspec.models.fused import FusedStack


class Attention(Protocol):
    """What a layer does with other rows."""

    def __call__(self, index: int, read: Tensor, rope: Tensor, attend: Attend) -> Tensor:
        """index: of the layer; read: [rows, inputs]; rope: of the rows, as `rotation` gives it. Returns what is added
        to the stream: [rows, hidden_size]."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer, but for the norm of what its attention reads: draft models read something else there."""

    config: ModelConfig
    attention: Attention
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix

    def __call__(self, index: int, x: Tensor, read: Tensor, rope: Tensor, attend: Attend) -> Tensor:
        """x: residual stream [rows, hidden_size]; the others as of Attention. Returns the stream that leaves the
        layer."""
        x = x + self.attention(index, read, rope, attend)
        gate, up = self.gate_up(rms(x, self.mlp_norm, self.config)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


@dataclass(frozen=True, slots=True)
class HeadedAttention:
    """Each query head has a key and a value head, of its own or shared by a group. None where the architecture has no
    such parameter."""

    config: ModelConfig
    qkv: Matrix
    output: Matrix
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None

    def __call__(self, index: int, read: Tensor, rope: Tensor, attend: Attend) -> Tensor:
        """See Attention."""
        return self.output(attend(index, *self.heads(read, rope)))

    def heads(self, read: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [rows, num_heads, head_dim], keys and values [rows, num_kv_heads, head_dim], rotary applied."""
        config = self.config
        heads, turned = config.num_heads, config.num_heads + config.num_kv_heads
        qkv = self.qkv(read).view(read.shape[0], -1, config.head_dim)
        qk = qkv[:, :turned]
        if self.query_norm is not None and self.key_norm is not None:
            qk = torch.cat((rms(qk[:, :heads], self.query_norm, config), rms(qk[:, heads:], self.key_norm, config)), 1)
        qk = rotate(qk, rope)
        return qk[:, :heads], qk[:, heads:], qkv[:, turned:]


class Head:
    """The output head. weight: [tokens, hidden_size]; vocab_size: of the model, the number of tokens by default. Ids
    beyond the tokens are never said: their logits are -inf."""

    def __init__(self, weight: Tensor, vocab_size: int | None = None) -> None:
        self.weight = weight
        self._product = _head_product(weight)
        self._silent = 0 if vocab_size is None else vocab_size - len(weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size]. Returns float32 [rows, vocab_size], accumulated and kept in float32.

        Rounding logits to half precision makes ties, which would decide tokens.
        """
        logits = self._product(hidden)
        return F.pad(logits, (0, self._silent), value=-math.inf) if self._silent else logits


def _head_product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    if fusible(weight):
        from distspec.kernels.product import float32_product

        return lambda hidden: float32_product(hidden, weight)
    if weight.is_cuda and weight.dtype != torch.float32:
        return lambda hidden: torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    # A CPU has no half-precision product with a float32 result, so it keeps the head in float32.
    matrix = Matrix(weight.float())
    return lambda hidden: matrix(hidden.float())


def parameters(config: ModelConfig) -> dict[str, Parts]:
    """Every parameter of the model and the checkpoint tensors it is made of, in Hugging Face's names."""
    hidden = config.hidden_size
    table: dict[str, Parts] = {"embedding": {"model.embed_tokens.weight": (config.vocab_size, hidden)}}
    for i in range(config.num_layers):
        table |= {f"layers.{i}.{name}": parts for name, parts in layer_parts(config, f"model.layers.{i}").items()}
    table["norm"] = {"model.norm.weight": (hidden,)}
    if not config.tie_embeddings:
        table["head"] = {"lm_head.weight": (config.vocab_size, hidden)}
    return table


def layer_parts(config: ModelConfig, at: str, inputs: int | None = None) -> dict[str, Parts]:
    """Parameters of the layer that a checkpoint names `at`. inputs: what attention reads, hidden_size by default."""
    hidden, inner = config.hidden_size, config.intermediate_size
    attention = latent_parts(config, config.latent, at, inputs or hidden) if config.latent else None
    return {
        "attention_norm": {f"{at}.input_layernorm.weight": (hidden,)},
        **(attention or _headed_parts(config, at, inputs or hidden)),
        "mlp_norm": {f"{at}.post_attention_layernorm.weight": (hidden,)},
        "gate_up": {f"{at}.mlp.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")},
        "down": {f"{at}.mlp.down_proj.weight": (hidden, inner)},
    }


def _headed_parts(config: ModelConfig, at: str, inputs: int) -> dict[str, Parts]:
    hidden, dim = config.hidden_size, config.head_dim
    rows = {"q": config.num_heads * dim, "k": config.num_kv_heads * dim, "v": config.num_kv_heads * dim}
    table: dict[str, Parts] = {
        "qkv": {f"{at}.self_attn.{x}_proj.weight": (count, inputs) for x, count in rows.items()},
        "output": {f"{at}.self_attn.o_proj.weight": (hidden, rows["q"])},
    }
    if config.attention_bias:
        table["qkv_bias"] = {f"{at}.self_attn.{x}_proj.bias": (count,) for x, count in rows.items()}
    if config.output_bias:
        table["output_bias"] = {f"{at}.self_attn.o_proj.bias": (hidden,)}
    if config.qk_norm:
        table["query_norm"] = {f"{at}.self_attn.q_norm.weight": (dim,)}
        table["key_norm"] = {f"{at}.self_attn.k_norm.weight": (dim,)}
    return table


class Llama:
    """A model whose parameters are given; see `parameters` for their names and shapes.

    All parameters share one dtype and device. Nothing in here is ever written to.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.dtype = weights["embedding"].dtype
        self.weights = dict(weights)
        self.embedding = weights["embedding"]
        self.norm = weights["norm"]
        self.head = Head(self.embedding if config.tie_embeddings else weights["head"], config.vocab_size)
        self.layers = [make_layer(config, weights, f"layers.{i}.") for i in range(config.num_layers)]
        self.attention_norms = [weights[f"layers.{i}.attention_norm"] for i in range(config.num_layers)]
        self.rope = rope_table(config).to(self.embedding.device, self.dtype)
        self._fused = self._fuse() if fusible(self.embedding) and config.latent is None else None

    def _fuse(self) -> FusedStack:
        from distspec.models.fused import FusedStack  # imports Triton

        return FusedStack(self.config, self.weights, self.rope)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, taps: Taps | None = None) -> Tensor:
        """tokens, positions: int64 [rows], positions below config.max_position. Returns hidden [rows, hidden_size]."""
        if self._fused is not None and isinstance(attend, Paged):
            return self._fused.forward(tokens, positions, attend, taps)
        x = F.embedding(tokens, self.embedding)
        rope = rotation(self.rope, positions)
        for i, (layer, norm) in enumerate(zip(self.layers, self.attention_norms, strict=True)):
            if taps is not None:
                taps.take(i, x)
            x = layer(i, x, rms(x, norm, self.config), rope, attend)
        if taps is not None:
            taps.take(len(self.layers), x)
        return rms(x, self.norm, self.config)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden_size]. Returns float32 [rows, vocab_size]."""
        return self.head(hidden)


def fusible(weight: Tensor) -> bool:
    """Whether the kernels of distspec.kernels take weights of this dtype on this device. In float32 they would buy
    little and cost the equality with a CPU."""
    if not weight.is_cuda or weight.dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.get_device_capability(weight.device) >= (8, 0)


def make_layer(config: ModelConfig, weights: Mapping[str, Tensor], prefix: str) -> Layer:
    """The layer whose parameters are those of `layer_parts`, with this prefix."""
    own = {name: weights[prefix + name] for name in layer_parts(config, "") if prefix + name in weights}
    attention: Attention = _headed(config, own) if config.latent is None else _latent(config, config.latent, own)
    return Layer(config, attention, own["mlp_norm"], Matrix(own["gate_up"]), Matrix(own["down"]))


def _latent(config: ModelConfig, shape: Latent, own: Mapping[str, Tensor]) -> LatentAttention:
    return LatentAttention(config, shape, own, fused=fusible(own["expand"]))


def _headed(config: ModelConfig, own: Mapping[str, Tensor]) -> HeadedAttention:
    return HeadedAttention(
        config,
        qkv=Matrix(own["qkv"], own.get("qkv_bias")),
        output=Matrix(own["output"], own.get("output_bias")),
        query_norm=own.get("query_norm"),
        key_norm=own.get("key_norm"),
    )


def rms(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    """Root-mean-square norm over the last dimension, which is that of `weight`."""
    return F.rms_norm(x, weight.shape, weight, config.rms_eps)


def random_model(
    config: ModelConfig, *, seed: int, dtype: torch.dtype, device: torch.device, drawn_on: torch.device | None = None
) -> Llama:
    """A model with random weights, a function of config and seed alone, scaled so that logits differ visibly.

    drawn_on: the device that draws; a CPU by default. A GPU has other numbers for a seed, and large models soon.
    """
    weights = random_weights(parameters(config), seed=seed, dtype=dtype, device=device, drawn_on=drawn_on)
    return Llama(config, weights)


def random_weights(
    table: Mapping[str, Parts],
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    drawn_on: torch.device | None = None,
) -> dict[str, Tensor]:
    """Every parameter of a table, random: norms near one, matrices such that a product keeps its input's scale."""
    generator = torch.Generator(drawn_on or "cpu").manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator, device=generator.device)
        if len(shape) == 1:
            noise = 0.1 * noise + name.endswith("norm.weight")
        elif "embed_tokens" not in name:
            noise = noise / math.sqrt(shape[1])
        return noise.to(dtype)

    return {
        name: torch.cat([draw(part, shape) for part, shape in parts.items()]).to(device)
        for name, parts in table.items()
    }


def prefix_layers(model: Llama, n: int) -> Llama:
    """The first n layers with the final norm and head, sharing weights: a weak drafter for tests."""
    config = replace(model.config, num_layers=n)
    return Llama(config, {name: model.weights[name] for name in parameters(config)})


def widened(model: Llama, vocab_size: int) -> Llama:
    """The same model over a vocabulary with ids behind its own, which mean nothing to it: it may read them, and never
    says them."""
    known = model.config.vocab_size
    if vocab_size == known:
        return model
    embedding = F.pad(model.embedding, (0, 0, 0, vocab_size - known))
    head = embedding[:known] if model.config.tie_embeddings else model.weights["head"]
    config = replace(model.config, vocab_size=vocab_size, tie_embeddings=False)
    return Llama(config, model.weights | {"embedding": embedding, "head": head})
