"""What a checkpoint's config.json says about a decoder of the Llama family, or of DeepSeek's without experts.

Knows Hugging Face's key names, old and new, and which variants the code can compute. Does not know tensors,
devices, or where a checkpoint came from. A variant that would be computed wrongly is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distspec.errors import ConfigError, ModelNotFound
from distspec.models.fields import Fields, read_object

FIELD = "model.name"
"""What names the target's folder in the configuration."""

DRAFT_FIELD = "speculation.draft_model"
"""The same of a draft model's."""

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
    def from_pretrained(cls, folder: str | Path, field: str = FIELD) -> ModelConfig:
        """The configuration of a checkpoint folder. field: what names the folder in the configuration.

        Raises ModelNotFound without a config.json, ConfigError for what this code cannot compute.
        """
        path = Path(folder) / "config.json"
        more = path.with_name("generation_config.json")
        return cls.from_tree(
            read_tree(folder, field),
            str(path),
            field=field,
            eos=Fields(_read(more, field), str(more), field).ids("eos_token_id"),
        )

    @classmethod
    def from_tree(
        cls, tree: Mapping[str, Any], where: str, *, field: str = FIELD, eos: frozenset[int] = frozenset()
    ) -> ModelConfig:
        """The configuration that a config.json, or a part of one, holds. where: it was found; field: what names it in
        the configuration; eos: end tokens that are known beside its own. Raises ConfigError for what this code cannot
        compute."""
        fields = Fields(tree, where, field)
        _refuse_unsupported(fields)
        config = cls._of(fields, eos)
        if config.num_heads % config.num_kv_heads or config.rope_dim % 2:
            shape = f"{config.num_heads} heads over {config.num_kv_heads} of keys, {config.rope_dim} numbers rotated"
            raise ConfigError(field, f"{where}: {shape}: need a multiple, and an even number")
        return config

    @classmethod
    def _of(cls, fields: Fields, eos: frozenset[int]) -> ModelConfig:
        rope, latent = _rope(fields), _latent(fields)
        heads, hidden, kind = (
            fields.count("num_attention_heads"),
            fields.count("hidden_size"),
            fields.tree["model_type"],
        )
        kv_heads = fields.count("num_key_value_heads", heads)
        return cls(
            num_layers=fields.count("num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=1 if latent else kv_heads,
            head_dim=latent.rank + latent.rope_dim if latent else fields.count("head_dim", hidden // heads),
            intermediate_size=fields.count("intermediate_size"),
            vocab_size=fields.count("vocab_size"),
            max_position=fields.count("max_position_embeddings"),
            model_type=kind,
            rms_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
            rope_scaling=_scaling(rope),
            tie_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias", kind == "qwen2"),
            eos_token_ids=tuple(sorted(fields.ids("eos_token_id") | eos)),
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


def read_tree(folder: str | Path, field: str = FIELD) -> dict[str, Any]:
    """What a folder's config.json holds. Raises ModelNotFound without one, ConfigError if it is no JSON object."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ModelNotFound(str(folder), [str(path)])
    return _read(path, field)


def _read(path: Path, field: str = FIELD) -> dict[str, Any]:
    return read_object(path, field) if path.is_file() else {}


def _rope(fields: Fields) -> Fields:
    """Rotary parameters: one object since transformers 5, a scaling object beside rope_theta before."""
    return fields.part("rope_parameters" if fields.tree.get("rope_parameters") else "rope_scaling")


def _rope_kind(rope: Fields) -> str:
    return str(rope.tree.get("rope_type") or rope.tree.get("type") or "default")


def _scaling(rope: Fields) -> RopeScaling | None:
    kind = _rope_kind(rope)
    if kind == "default":
        return None
    if kind == "yarn":
        return RopeScaling(
            kind=kind,
            factor=rope.number("factor"),
            original_max_position=rope.count("original_max_position_embeddings"),
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            mscale=rope.number("mscale", 0.0, may_be_zero=True),
            mscale_all_dim=rope.number("mscale_all_dim", 0.0, may_be_zero=True),
        )
    return RopeScaling(
        kind=kind,
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        original_max_position=rope.count("original_max_position_embeddings", 8192),
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


def _latent(fields: Fields) -> Latent | None:
    if fields.tree["model_type"] not in LATENT_TYPES:
        return None
    return Latent(
        rank=fields.count("kv_lora_rank"),
        query_rank=fields.count("q_lora_rank", 0, least=0) or None,
        plain_dim=fields.count("qk_nope_head_dim"),
        rope_dim=fields.count("qk_rope_head_dim"),
        value_dim=fields.count("v_head_dim"),
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


def _refuse_unsupported(fields: Fields) -> None:
    tree, rope = fields.tree, _rope(fields)
    windowed = tree.get("sliding_window") and tree.get("use_sliding_window", tree.get("model_type") == "mistral")
    part = rope.tree.get("partial_rotary_factor", tree.get("partial_rotary_factor", 1.0))
    found = {
        "model_type": (tree.get("model_type"), tuple(ARCHITECTURES)),
        "hidden_act": (tree.get("hidden_act", "silu"), ("silu",)),
        "rope_type": (_rope_kind(rope), ("default", "linear", "llama3", "yarn")),
        "attention_factor": (rope.tree.get("attention_factor"), (None,)),
        "truncate": (rope.tree.get("truncate", True), (True,)),
        "partial_rotary_factor": (part, (1.0,)),
        "mlp_bias": (bool(tree.get("mlp_bias", False)), (False,)),
        "sliding_window": (tree["sliding_window"] if windowed else None, (None,)),
        "quantization_config": (tree.get("quantization_config"), (None,)),
    }
    if tree.get("model_type") in LATENT_TYPES:
        experts = fields.count("num_hidden_layers") - fields.count("first_k_dense_replace", 0, least=0)
        found |= {
            "attention_bias": (bool(tree.get("attention_bias", False)), (False,)),
            "rope_interleave": (tree.get("rope_interleave", True), (True,)),
            "layers with experts:": (max(0, experts), (0,)),
        }
    for key, (value, supported) in found.items():
        if value not in supported:
            options = " or ".join(map(str, supported))
            raise ConfigError(fields.field, f"{fields.where}: {key} {value!r} is not supported; supported: {options}")
