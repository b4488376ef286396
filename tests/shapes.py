"""Small configurations of every supported kind."""

from __future__ import annotations

from dataclasses import replace

from distspec.models import ModelConfig, RopeScaling

LLAMA = ModelConfig(
    num_layers=3,
    hidden_size=48,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=80,
    vocab_size=101,
    max_position=256,
    rms_eps=1e-5,
    rope_theta=10000.0,
    eos_token_ids=(2,),
)

TINY = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=97,
    max_position=512,
)
"""For whole fleets, where the model is the least of it."""

KINDS = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tie_embeddings=True),
    "wide heads": replace(LLAMA, head_dim=16),
    "bias": replace(LLAMA, attention_bias=True),
    "linear rope": replace(LLAMA, rope_scaling=RopeScaling("linear", 4.0)),
    "llama3 rope": replace(LLAMA, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
    "mistral": replace(LLAMA, model_type="mistral"),
    "qwen2": replace(LLAMA, model_type="qwen2", attention_bias=True, tie_embeddings=True),
    "qwen3": replace(LLAMA, model_type="qwen3", head_dim=16),
}
