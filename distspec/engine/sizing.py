"""How many KV pages fit.

Knows bytes, of the device and of one position. Does not know requests.
"""

from __future__ import annotations

import os

import torch

from distspec import config
from distspec.errors import InvalidValue
from distspec.kv.pool import KVPool
from distspec.models.config import ModelConfig

_CPU_BYTES = 512 * 2**20
"""Pool of one CPU worker unless one request needs more: several workers share a laptop."""

_CPU_SHARE = 0.25
"""Of the host's memory, at most. Pages that were never written take no memory yet."""


def pages_that_fit(
    model: ModelConfig,
    options: config.Engine,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    features: int = 0,
) -> int:
    """Pages for the pool: as configured, or from memory, and never more than all slots can use.

    features: values kept of each position beside its KV. Call it after the weights are loaded. Raises InvalidValue
    (a ConfigError) if not one page is left.
    """
    if options.num_pages is not None:
        return options.num_pages
    position = KVPool.position_bytes(model.num_layers, model.num_kv_heads, model.head_dim, dtype, features)
    one = options.pages_for(max_model_len)
    if device.type == "cuda":
        fit = _cuda_bytes(model, options, device, features) // (position * options.page_size)
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        budget = min(max(_CPU_BYTES, one * options.page_size * position), int(_CPU_SHARE * memory))
        fit = budget // (position * options.page_size)
    if fit < 1:
        raise InvalidValue("engine.gpu_memory_utilization", options.gpu_memory_utilization, "room for one KV page")
    return min(fit, one * options.max_num_seqs)


def _cuda_bytes(model: ModelConfig, options: config.Engine, device: torch.device, features: int) -> int:
    """What gpu_memory_utilization leaves after everything that is allocated now and a step's activations."""
    free, total = torch.cuda.mem_get_info(device)
    judged = options.max_num_seqs * (1 + options.max_scratch_nodes)
    # float32 logits, noise, and two temporaries of the truncation; inner activations of the largest step
    activations = 4 * 4 * judged * model.vocab_size
    inner = model.intermediate_size + model.hidden_size + features
    activations += 4 * 4 * (options.max_num_batched_tokens + judged) * inner
    return int(options.gpu_memory_utilization * total) - (total - free) - activations
