"""Microseconds of one layer's attention, beside the time that its keys and values take on this GPU.

Knows spans, backends and bytes. Does not know models or engines. Every figure is the median of replays of a CUDA graph
whose calls take turns on layers that together do not fit the cache; pages lie in random order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import torch

from distspec.attention import BACKENDS, Span
from distspec.bench.kernels import copy_bandwidth, timed
from distspec.bench.report import Row, machine, row
from distspec.errors import ConfigError
from distspec.kv.pool import KVPool
from distspec.models.config import ModelConfig
from distspec.models.shapes import PREFIX, shape_folder

HALF = torch.bfloat16
TREE = 64
_COLD = 200 * 2**20
"""Bytes that no cache holds."""


def measure(
    shapes: Sequence[str], backends: Sequence[str], batches: Sequence[int], contexts: Sequence[int], page_size: int
) -> list[Row]:
    """Decode tokens, chains of 8 and 64, and trees of 64 nodes. Raises ConfigError without CUDA."""
    if not torch.cuda.is_available():
        raise ConfigError("engine.device", "bench attention needs a CUDA device")
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    context = machine("torch", "triton") | {"gpu": torch.cuda.get_device_name(), "page_size": page_size}
    context["copy_bandwidth_gb_s"] = round(bandwidth / 1e9)
    found = []
    for shape in shapes:
        config = ModelConfig.from_pretrained(shape_folder(PREFIX + shape))
        for batch in batches:
            for length in contexts:
                kept = KVPool.position_bytes(1, config.num_kv_heads, config.head_dim, HALF, latent=config.kv_latent)
                moved = batch * length * kept
                pool = _pool(config, batch * (length + TREE + 2 * page_size), moved, device)
                bound = moved / bandwidth * 1e6
                for backend in backends:
                    made = BACKENDS[backend]()(pool, page_size, config.num_heads)
                    for kind, spans in _kinds(batch, length, page_size).items():
                        rows = sum(span.rows for span in spans)
                        q = torch.randn(rows, config.num_heads, config.head_dim, dtype=HALF, device=device)
                        plan = made.plan(spans)
                        time = timed([partial(made.read, plan, layer, q) for layer in range(len(pool.layers))])
                        name = f"attention/{shape}/{backend}/{kind}/b{batch}/{length}"
                        found.append(row(name, time, "us", bound, {**context, "bytes": moved}))
                del pool
    return found


def _pool(config: ModelConfig, locations: int, moved: int, device: torch.device) -> KVPool:
    layers = min(32, 2 + _COLD // moved)
    kept = (layers, locations, config.num_kv_heads, config.head_dim)
    pool = KVPool(*kept, latent=config.kv_latent, dtype=HALF, device=device)
    pool.data.normal_()
    return pool


def _kinds(batch: int, length: int, page_size: int) -> dict[str, list[Span]]:
    draw = random.Random(0)
    each = -(-(length + TREE) // page_size)
    pages = draw.sample(range(batch * each), batch * each)
    tables = [pages[i * each : (i + 1) * each] for i in range(batch)]
    tree: list[list[int]] = []
    for index in range(length, length + TREE):
        tree.append([*(draw.choice(tree) if tree else []), index])
    return {
        "decode": [Span(table, length, 1, (), [0]) for table in tables],
        "chain8": [Span(table, length, 8, (), [0] * 8) for table in tables],
        "chain64": [Span(table, length + TREE, TREE, (), [0] * TREE) for table in tables],
        "tree64": [Span(table, length, 0, tuple(tree), [0] * TREE) for table in tables],
    }
