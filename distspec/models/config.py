"""What a checkpoint's config.json says about a decoder of the Llama family, or of DeepSeek's without experts.

Knows Hugging Face's key names, old and new, and which variants the code can compute. Does not know tensors,
devices, or where a checkpoint came from. A variant that would be computed wrongly is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distspec.errors import ConfigError, ModelNotFound

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
LATENT_TYPES = ("deepseek_v2", "deepseek_v3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched. kind `linear` uses factor only; `llama3` and `yarn` the fields up to their
    own.

    original_max_position: the context in tokens that the model was first trained with. beta_fast, beta_slow: turns
    within it between which `yarn` (arXiv 2309.00071) goes from frequencies as they are to stretched ones. mscale,
    mscale_all_dim: how much scores grow with the context, in DeepSeek's notation; 0: not stated.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434): of a position all heads share one latent of `rank` numbers,
    which their keys and values are made of, and a rotary key of `rope_dim`.

    query_rank: of a latent that queries are made of; None: of the hidden state itself. plain_dim: of a head's query and
    key beside the rotary part; value_dim: of its value.
    """

    rank: int
    query_rank: int | None
    plain_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder. Heads and sizes are of the whole model, max_position counts tokens.

    KV heads and head_dim are those of the pages: with latents there is one, of latent.rank + latent.rope_dim numbers.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    model_type: str = "llama"
    rms_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()
    latent: Latent | None = None

    @property
    def kv_latent(self) -> int:
        """How many numbers of a key are its value: see KVPool; 0: values lie apart."""
        return self.latent.rank if self.latent else 0

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def output_bias(self) -> bool:
        """The attention output projection has a bias (Qwen2 has one on q, k and v only)."""
        return self.attention_bias and self.model_type != "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Query and key heads are RMS-normalised before rotary."""
        return self.model_type == "qwen3"

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> ModelConfig:
        """The configuration of a checkpoint folder.

        Raises ModelNotFound without a config.json, ConfigError for what this code cannot compute.
        """
        path = Path(folder) / "config.json"
        tree = read_tree(folder)
        more = _read(path.with_name("generation_config.json"))
        return cls.from_tree(tree, str(path), eos=_eos(tree) | _eos(more))

    @classmethod
    def from_tree(
        cls, tree: dict[str, Any], where: str, *, field: str = "model.name", eos: Collection[int] = ()
    ) -> ModelConfig:
        """The configuration that a config.json, or a part of one, holds. where: it was found; field: what names it in
        the configuration. Raises ConfigError for what this code cannot compute."""
        _refuse_unsupported(where, tree, field)
        try:
            return cls._of(tree, eos)
        except KeyError as key:
            raise ConfigError(field, f"{where}: key {key} is missing") from None

    @classmethod
    def _of(cls, tree: dict[str, Any], eos: Collection[int]) -> ModelConfig:
        rope = _rope(tree)
        heads, hidden, kind = tree["num_attention_heads"], tree["hidden_size"], tree["model_type"]
        latent = _latent(tree)
        kv_heads, dim = tree.get("num_key_value_heads") or heads, tree.get("head_dim") or hidden // heads
        return cls(
            num_layers=tree["num_hidden_layers"],
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=1 if latent else kv_heads,
            head_dim=latent.rank + latent.rope_dim if latent else dim,
            intermediate_size=tree["intermediate_size"],
            vocab_size=tree["vocab_size"],
            max_position=tree["max_position_embeddings"],
            model_type=kind,
            rms_eps=tree.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta") or tree.get("rope_theta") or 10000.0),
            rope_scaling=_scaling(rope),
            tie_embeddings=bool(tree.get("tie_word_embeddings", False)),
            attention_bias=bool(tree.get("attention_bias", kind == "qwen2")),
            eos_token_ids=tuple(sorted(eos)),
            latent=latent,
        )

    def to_tree(self) -> dict[str, Any]:
        """The same as a config.json that transformers reads too."""
        tree: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.rms_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_embeddings,
            "attention_bias": self.attention_bias,
            "hidden_act": "silu",
        }
        if self.model_type == "mistral":
            tree["sliding_window"] = None
        if self.eos_token_ids:
            tree["eos_token_id"] = list(self.eos_token_ids)
        if self.rope_scaling:
            tree["rope_scaling"] = _scaling_tree(self.rope_scaling)
        if self.latent:
            tree |= _latent_tree(self.latent, self)
        return tree


def read_tree(folder: str | Path, field: str = "model.name") -> dict[str, Any]:
    """What a folder's config.json holds. Raises ModelNotFound without one, ConfigError if it is no JSON object."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelNotFound(str(folder), [str(path)])
    return _read(path, field)


def _read(path: Path, field: str = "model.name") -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        tree = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(field, f"{path}: not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(field, f"{path}: the top level must be an object")
    return tree


def _eos(tree: dict[str, Any]) -> set[int]:
    ids = tree.get("eos_token_id")
    return set() if ids is None else set(ids) if isinstance(ids, list) else {ids}


def _rope(tree: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters: one dict since transformers 5, a scaling dict beside rope_theta before."""
    return tree.get("rope_parameters") or tree.get("rope_scaling") or {}


def _rope_kind(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = _rope_kind(rope)
    if kind == "default":
        return None
    if kind == "yarn":
        return RopeScaling(
            kind=kind,
            factor=float(rope["factor"]),
            original_max_position=int(rope["original_max_position_embeddings"]),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            mscale=float(rope.get("mscale") or 0.0),
            mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
        )
    return RopeScaling(
        kind=kind,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        original_max_position=int(rope.get("original_max_position_embeddings", 8192)),
    )


def _scaling_tree(scaling: RopeScaling) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }
    if scaling.kind == "yarn":
        own = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        return tree | {name: getattr(scaling, name) for name in own if getattr(scaling, name)}
    return tree | {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}


def _latent(tree: dict[str, Any]) -> Latent | None:
    if tree["model_type"] not in LATENT_TYPES:
        return None
    return Latent(
        rank=tree["kv_lora_rank"],
        query_rank=tree["q_lora_rank"],
        plain_dim=tree["qk_nope_head_dim"],
        rope_dim=tree["qk_rope_head_dim"],
        value_dim=tree["v_head_dim"],
    )


def _latent_tree(latent: Latent, config: ModelConfig) -> dict[str, Any]:
    """DeepSeek's keys. Layers above the dense ones have experts, so all are dense."""
    return {
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "head_dim": latent.rope_dim,
        "num_key_value_heads": config.num_heads,
        "first_k_dense_replace": config.num_layers,
    }


def _refuse_unsupported(where: str, tree: dict[str, Any], field: str) -> None:
    windowed = tree.get("sliding_window") and tree.get("use_sliding_window", tree.get("model_type") == "mistral")
    rope = _rope(tree)
    found = {
        "model_type": (tree.get("model_type"), tuple(ARCHITECTURES)),
        "hidden_act": (tree.get("hidden_act", "silu"), ("silu",)),
        "rope_type": (_rope_kind(rope), ("default", "linear", "llama3", "yarn")),
        "attention_factor": (rope.get("attention_factor"), (None,)),
        "truncate": (rope.get("truncate", True), (True,)),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", tree.get("partial_rotary_factor", 1.0)), (1.0,)),
        "mlp_bias": (bool(tree.get("mlp_bias", False)), (False,)),
        "sliding_window": (tree["sliding_window"] if windowed else None, (None,)),
        "quantization_config": (tree.get("quantization_config"), (None,)),
    }
    if tree.get("model_type") in LATENT_TYPES:
        dense = tree.get("first_k_dense_replace") or 0
        found |= {
            "attention_bias": (bool(tree.get("attention_bias", False)), (False,)),
            "rope_interleave": (tree.get("rope_interleave", True), (True,)),
            "layers with experts:": (max(0, tree.get("num_hidden_layers", 0) - dense), (0,)),
        }
    for key, (value, supported) in found.items():
        if value not in supported:
            options = " or ".join(map(str, supported))
            raise ConfigError(field, f"{where}: {key} {value!r} is not supported; supported: {options}")
