"""Milliseconds of an engine's steps, beside the time that weights and KV take on this GPU.

Knows engines, segments and bytes. Does not know drafters or rounds: trees are random, and dropped after each step.
`step` is the wall time of Engine.step, host work included; `graph` that of the replayed forward alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
from msgspec.structs import replace

from distspec import config
from distspec.bench.kernels import copy_bandwidth
from distspec.bench.report import Context, Row, machine, row
from distspec.engine import Engine, Segment
from distspec.errors import ConfigError
from distspec.kv.pool import KVPool
from distspec.models import load_model
from distspec.models.llama import Llama
from distspec.models.shapes import PREFIX
from distspec.protocol.values import ROOT, Node, SamplingParams

HALF = torch.bfloat16
CONTEXT = 1024
_PREFILL = 512


def measure(
    shapes: Sequence[str], batches: Sequence[int], nodes: Sequence[int], repetitions: int, options: config.Engine
) -> list[Row]:
    """Decode steps of these batches, and verify steps of one request with these numbers of rows, of `random:` shapes.
    Raises ConfigError without CUDA."""
    if not torch.cuda.is_available():
        raise ConfigError("engine.device", "bench engine needs a CUDA device")
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device)
    context = machine("torch", "triton") | {"gpu": torch.cuda.get_device_name(), "context": CONTEXT}
    context |= {"copy_bandwidth_gb_s": round(bandwidth / 1e9), "cuda_graphs": str(options.cuda_graphs)}
    found = []
    for shape in shapes:
        model = load_model(PREFIX + shape, dtype=HALF, device=device)
        pages = options.num_pages or options.max_num_seqs * options.pages_for(2 * CONTEXT)
        engine = Engine(model, replace(options, num_pages=pages), device=device, max_model_len=2 * CONTEXT)
        found += Steps(shape, model, engine, bandwidth, repetitions, context).rows(batches, nodes)
        del model, engine
        torch.cuda.empty_cache()
    return found


class Steps:
    """One engine with a request of CONTEXT tokens in each slot."""

    def __init__(
        self, shape: str, model: Llama, engine: Engine, bandwidth: float, repetitions: int, context: Context
    ) -> None:
        self._shape = shape
        self._model = model
        self._engine = engine
        self._bandwidth = bandwidth
        self._repetitions = repetitions
        self._context = context
        self._slots = [self._open(seed) for seed in range(engine.slots)]

    def rows(self, batches: Sequence[int], nodes: Sequence[int]) -> list[Row]:
        found = []
        for batch in batches:
            if batch <= len(self._slots):
                found += self._measured(f"decode/b{batch}", batch, 0)
        for count in nodes:
            found += self._measured(f"verify/n{count}", 1, count - 1)
        return found

    def _open(self, seed: int) -> int:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        slot = self._engine.open((), params, use_cache=False)
        self._engine.reserve(slot, CONTEXT + self._engine.page_size + 256)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self._engine.model.config.vocab_size, (CONTEXT,), generator=generator).tolist()
        for start in range(0, CONTEXT, _PREFILL):
            self._engine.step([Segment(slot, tuple(tokens[start : start + _PREFILL]), want=False)])
        return slot

    def _measured(self, name: str, batch: int, nodes: int) -> list[Row]:
        """Wall time of steps of one token and so many nodes below it, and of the replay within."""
        engine, slots = self._engine, self._slots[:batch]
        tree = tuple(Node(id=i, parent=i // 2 - 1 if i > 1 else ROOT, token=i) for i in range(nodes))
        segments = [Segment(slot, (7,), tree) for slot in slots]
        walls, replays = [], []
        for _ in range(self._repetitions + 3):
            start = time.perf_counter()
            engine.step(segments)
            walls.append(time.perf_counter() - start)
            replays.append(self._replay())
            for slot in slots:
                engine.commit(slot, (), drop=range(nodes))
                engine.sequence(slot).retract(1)
        context: Context = {**self._context, "rows": batch * (1 + nodes)}
        bound = step_bytes(self._model, batch) / self._bandwidth * 1e3
        times = {"step": walls, "graph": replays} if engine.runner.graphs is not None else {"step": walls}
        return [
            row(f"engine/{self._shape}/{name}/{what}", median(found[3:]) * 1e3, "ms", bound, context)
            for what, found in times.items()
        ]

    def _replay(self) -> float:
        """Seconds of the last step's graph, once more."""
        graphs = self._engine.runner.graphs
        if graphs is None or graphs.last is None:
            return 0.0
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graphs.replay(graphs.last)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3


def step_bytes(model: Llama, requests: int) -> int:
    """Of all weights that a step reads, and of the KV of so many requests of CONTEXT tokens."""
    shape = model.config
    weights = sum(
        tensor.nbytes for name, tensor in model.weights.items() if name != "embedding" or shape.tie_embeddings
    )
    kept = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
    position = KVPool.position_bytes(*kept, model.dtype, latent=shape.kv_latent)
    return weights + requests * CONTEXT * position
