"""Small configurations of every supported kind."""

from __future__ import annotations

from dataclasses import replace

from distspec.models import ModelConfig, RopeScaling
from distspec.models.config import Latent

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

SMALLEST = ModelConfig(
    num_layers=1,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=16,
    vocab_size=31,
    max_position=64,
)
"""Where nobody looks at what it says."""

SHARED = Latent(rank=24, query_rank=20, plain_dim=12, rope_dim=8, value_dim=10)
LATENT = replace(
    LLAMA,
    model_type="deepseek_v3",
    latent=SHARED,
    num_kv_heads=1,
    head_dim=32,
)
TINY_LATENT = replace(TINY, model_type="deepseek_v2", latent=SHARED, num_kv_heads=1, head_dim=32)
YARN = RopeScaling("yarn", 8.0, original_max_position=4096)

KINDS = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tie_embeddings=True),
    "wide heads": replace(LLAMA, head_dim=16),
    "bias": replace(LLAMA, attention_bias=True),
    "linear rope": replace(LLAMA, rope_scaling=RopeScaling("linear", 4.0)),
    "llama3 rope": replace(LLAMA, rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
    "yarn rope": replace(LLAMA, rope_scaling=YARN),
    "mistral": replace(LLAMA, model_type="mistral"),
    "qwen2": replace(LLAMA, model_type="qwen2", attention_bias=True, tie_embeddings=True),
    "qwen3": replace(LLAMA, model_type="qwen3", head_dim=16),
    "deepseek v3": LATENT,
    "deepseek v3 yarn": replace(LATENT, rope_scaling=replace(YARN, mscale=0.7, mscale_all_dim=1.0)),
    "deepseek v2": replace(LATENT, model_type="deepseek_v2", rope_scaling=replace(YARN, mscale_all_dim=0.707)),
    "deepseek v2 lite": replace(LATENT, model_type="deepseek_v2", latent=replace(SHARED, query_rank=None)),
}
