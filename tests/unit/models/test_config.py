"""A config.json means the same however it is spelled, and what cannot be computed is refused by name."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from distspec.errors import ConfigError, ModelNotFound
from distspec.models import ModelConfig, RopeScaling
from tests.shapes import KINDS, LATENT, LLAMA


def read(folder: Path, tree: dict[str, Any], **generation: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(tree))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_written_and_read_is_the_same(kind: str, tmp_path: Path) -> None:
    assert read(tmp_path, KINDS[kind].to_tree()) == KINDS[kind]


def test_old_and_new_rotary_keys_mean_the_same(tmp_path: Path) -> None:
    old = LLAMA.to_tree() | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = LLAMA.to_tree() | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    del new["rope_theta"]
    found = read(tmp_path, old)
    assert found == read(tmp_path, new)
    assert found.rope_theta == 5e5
    assert found.rope_scaling == RopeScaling("linear", 2.0)


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA.to_tree() | {"eos_token_id": 7}, eos_token_id=[9, 7]).eos_token_ids == (7, 9)
    assert read(tmp_path, LLAMA.to_tree() | {"eos_token_id": None}, eos_token_id=None).eos_token_ids == ()


def test_heads_default_to_multi_head_attention(tmp_path: Path) -> None:
    tree = LLAMA.to_tree()
    del tree["num_key_value_heads"], tree["head_dim"]
    config = read(tmp_path, tree)
    assert (config.num_kv_heads, config.head_dim) == (6, 8)


def test_qwen2_has_biases_without_saying_so(tmp_path: Path) -> None:
    tree = KINDS["qwen2"].to_tree()
    del tree["attention_bias"]
    config = read(tmp_path, tree)
    assert config.attention_bias
    assert not config.output_bias


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("model_type", {"model_type": "gpt_neox"}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("rope_type", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
        ("attention_factor", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0}}),
        ("truncate", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("mlp_bias", {"mlp_bias": True}),
        ("sliding_window", {"model_type": "mistral", "sliding_window": 4096}),
        ("sliding_window", {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}),
        ("quantization_config", {"quantization_config": {"quant_method": "gptq"}}),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(key: str, change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{key} .* is not supported"):
        read(tmp_path, LLAMA.to_tree() | change)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("attention_bias", {"attention_bias": True}),
        ("rope_interleave", {"rope_interleave": False}),
        ("layers with experts", {"first_k_dense_replace": 1}),
    ],
)
def test_what_latent_attention_and_its_models_lack_is_refused(key: str, change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{key}.* is not supported"):
        read(tmp_path, LATENT.to_tree() | change)


def test_pages_hold_one_head_of_latents_whatever_heads_a_config_states(tmp_path: Path) -> None:
    config = read(tmp_path, LATENT.to_tree())
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 1, 24 + 8)
    assert (config.kv_latent, config.rope_dim) == (24, 8)
    assert (LLAMA.kv_latent, LLAMA.rope_dim) == (0, LLAMA.head_dim)


def test_a_stretched_context_needs_the_first_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"original_max_position_embeddings.*missing"):
        read(tmp_path, LLAMA.to_tree() | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})


def test_an_unused_window_is_no_window(tmp_path: Path) -> None:
    tree = KINDS["qwen2"].to_tree() | {"sliding_window": 4096, "use_sliding_window": False}
    assert read(tmp_path, tree) == KINDS["qwen2"]


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    tree = LLAMA.to_tree()
    del tree[key]
    with pytest.raises(ConfigError, match=f"{key}.*missing"):
        read(tmp_path, tree)


JUNK: list[Any] = ["x", "", [], ["x"], {}, {"x": 1}, -1, 0, 1.5, 10**400, True, False, float("nan"), float("inf")]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_field_holds_it_is_read_or_refused_as_what_it_is(kind: str) -> None:
    """In the object itself and in its rotary parameters; what is read has the shape of a model."""
    tree = KINDS[kind].to_tree()
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32}
    for value in JUNK:
        for changed in [
            *({**tree, key: value} for key in [*tree, "rope_scaling", "eos_token_id", "first_k_dense_replace"]),
            *({**tree, "rope_scaling": {**scaling, key: value}} for key in [*scaling, "rope_theta", "mscale"]),
        ]:
            with suppress(ConfigError):
                config = ModelConfig.from_tree(changed, "config.json")
                sizes = (config.num_layers, config.hidden_size, config.num_heads, config.head_dim, config.max_position)
                assert all(type(size) is int and size > 0 for size in sizes), changed
                assert config.num_heads % config.num_kv_heads == config.rope_dim % 2 == 0, changed
                assert config.rms_eps > 0, changed
                assert all(map(math.isfinite, (config.rope_theta, config.rms_eps)))


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 0), ("hidden_size", "48"), ("rms_norm_eps", -1e-5), ("tie_word_embeddings", "no")],
)
def test_a_field_of_another_kind_is_named_with_what_it_needs(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"config\.json: {key} is .*, need"):
        read(tmp_path, LLAMA.to_tree() | {key: value})


@pytest.mark.parametrize("change", [{"num_key_value_heads": 4}, {"head_dim": 7}])
def test_heads_that_cannot_be_shared_or_rotated_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="6 heads over"):
        read(tmp_path, LLAMA.to_tree() | change)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_damaged_json_is_a_config_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_pretrained(tmp_path)


def test_no_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        ModelConfig.from_pretrained(tmp_path)
