"""Microseconds of each fused kernel, and of whole forwards, beside the time that their bytes take on this GPU.

Knows shapes and bytes. Does not know the engine: here are rows, pages and one model at a time. Every figure is the
median of replays of a CUDA graph, in which calls take turns on copies of their weights that do not fit the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor

from distspec.attention import Span, choose
from distspec.bench.report import Context, Row, machine, row
from distspec.errors import ConfigError
from distspec.kernels.accept import accept_and_move
from distspec.kernels.activation import silu_mul
from distspec.kernels.best import best_whole
from distspec.kernels.linear import Norm
from distspec.kernels.norm import add_rms_norm
from distspec.kernels.nucleus import draw_nucleus
from distspec.kernels.product import Adder, Reader, Stream, float32_product
from distspec.kernels.rope import HeadNorms, rope_and_write
from distspec.kernels.sample import draw_whole
from distspec.kernels.tell import tell_whole
from distspec.kernels.truncate import Limits, kept
from distspec.kv.pool import KVPool
from distspec.models import load_model
from distspec.models.base import Paged
from distspec.models.config import ModelConfig
from distspec.models.llama import Llama
from distspec.models.shapes import PREFIX, shape_folder
from distspec.sampling import GREEDY_BELOW
from distspec.sampling.edits import Penalties

HALF = torch.bfloat16
CONTEXT = 1024
_COLD = 200 * 2**20
"""Bytes that no cache holds."""
_PAGE = 16
_EPS = 1e-6


def measure(shapes: Sequence[str], rows: Sequence[int], forwards: bool) -> list[Row]:
    """Kernels, and forwards with head and draw at a context of CONTEXT tokens, of `random:` shapes at these numbers of
    rows. Raises ConfigError without CUDA."""
    if not torch.cuda.is_available():
        raise ConfigError("engine.device", "bench kernels needs a CUDA device")
    device = torch.device("cuda")
    context = machine("torch", "triton") | {"gpu": torch.cuda.get_device_name()}
    bandwidth = copy_bandwidth(device)
    context["copy_bandwidth_gb_s"] = round(bandwidth / 1e9)
    found = []
    for shape in shapes:
        config = ModelConfig.from_pretrained(shape_folder(PREFIX + shape))
        for count in rows:
            for name, calls, moved in _kernels(config, count, device):
                found.append(_row(f"{shape} {name} {count}", calls, moved, bandwidth, context))
        if forwards:
            found += _forwards(shape, rows, bandwidth, context, device)
    return found


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read plus bytes written per second by a kernel over a gibibyte; copy engines are slower."""
    source = torch.randn(2**28, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (timed([partial(torch.neg, source, out=target)] * 4) * 1e-6)


def timed(calls: Sequence[Callable[[], object]], repetitions: int = 20) -> float:
    """Microseconds of one call: of a graph of all of them, one after the other, in the median of its replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for _ in range(repetitions + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    del kept
    return median(times[3:]) / len(calls)


def _row(name: str, calls: Sequence[Callable[[], object]], moved: int, bandwidth: float, context: Context) -> Row:
    return row(name, timed(calls), "us", moved / bandwidth * 1e6, {**context, "bytes": moved})


Case = tuple[str, list[Callable[[], object]], int]
"""Name, calls that take turns, and bytes that one of them must move."""


def _kernels(config: ModelConfig, rows: int, device: torch.device) -> Iterator[Case]:
    yield from _products(config, rows, device)
    yield from _elementwise(config, rows, device)
    vocab = config.vocab_size
    logits = [torch.randn(rows, vocab, device=device) for _ in range(_copies(rows * vocab * 4))]
    warm, keys = torch.full((rows,), 0.8, device=device), torch.randint(1000, (rows, 3), device=device)
    yield "draw", [partial(draw_whole, x, warm, keys, GREEDY_BELOW) for x in logits], rows * vocab * 4
    shares, none = torch.full((rows,), 0.9, device=device), torch.zeros(rows, device=device)
    limits = Limits(none.long(), shares, none, any_top_k=False, any_top_p=True)
    yield "top_p", [partial(kept, x, warm, limits, GREEDY_BELOW) for x in logits], rows * vocab * 4
    guesses = [partial(best_whole, x, warm, keys, GREEDY_BELOW, 8) for x in logits]
    yield "best_8", guesses, rows * vocab * 4
    yield "logprobs_5", [partial(tell_whole, x, keys[:, 0], 5) for x in logits], rows * vocab * 4
    cold = torch.zeros(rows, device=device)
    yield "greedy", [partial(draw_whole, x, cold, keys, GREEDY_BELOW) for x in logits], rows * vocab * 4
    yield "chain", [partial(_chain, x, warm, keys, *_penalties(rows, vocab, device)) for x in logits], rows * vocab * 8
    yield _acceptance(config, rows, device)


def _penalties(rows: int, vocab: int, device: torch.device) -> tuple[Penalties, Limits]:
    """Of texts of CONTEXT tokens with four drafts below, and truncation: what a request may ask of every row."""
    seen = torch.zeros(rows, vocab, dtype=torch.int32, device=device)
    seen.scatter_(1, torch.randint(vocab, (rows, CONTEXT), device=device), 1)
    each, paths = torch.arange(rows, device=device), torch.randint(vocab, (rows, 4), device=device)
    penalties = torch.tensor([1.1, 0.2, 0.1], device=device).repeat(rows, 1)
    top_p, min_p = torch.full((rows,), 0.9, device=device), torch.full((rows,), 0.02, device=device)
    limits = Limits(each, top_p, min_p, any_top_k=False, any_top_p=True)
    return Penalties(each, each, paths, penalties, seen), limits


def _chain(logits: Tensor, temperature: Tensor, keys: Tensor, penalties: Penalties, limits: Limits) -> Tensor:
    penalties.apply_(logits)
    return draw_nucleus(logits, temperature, keys, limits.top_p, limits.min_p, GREEDY_BELOW)


def _products(config: ModelConfig, rows: int, device: torch.device) -> Iterator[Case]:
    """As they follow each other in a model: what reads the stream finds it prepared where the one before does that."""
    hidden, inner = config.hidden_size, config.intermediate_size
    attended = config.num_heads * config.head_dim
    norm = Norm(_random(hidden, device=device), _EPS)
    fresh = Stream(_random(rows, hidden, device=device))
    adders = (("output", attended), ("down", inner))
    readers = (("qkv", attended + 2 * config.num_kv_heads * config.head_dim, False), ("gate_up", 2 * inner, True))
    stream = fresh
    for name, inputs in adders:
        x = _random(rows, inputs, device=device)
        weights = _weights(hidden, inputs, device)
        stream = Adder(weights[0], norm)(x, fresh)
        moved = weights[0].nbytes + x.nbytes + 2 * fresh.x.nbytes
        yield name, [partial(Adder(weight, norm), x, fresh) for weight in weights], moved
    for name, outputs, gated in readers:
        weights = _weights(outputs, hidden, device)
        moved = weights[0].nbytes + fresh.x.nbytes + rows * outputs * (1 if gated else 2)
        yield name, [partial(Reader(weight, norm, gated=gated), stream) for weight in weights], moved
    weights = _weights(config.vocab_size, hidden, device)
    moved = weights[0].nbytes + fresh.x.nbytes + rows * config.vocab_size * 4
    yield "head", [partial(float32_product, fresh.x, weight) for weight in weights], moved


def _elementwise(config: ModelConfig, rows: int, device: torch.device) -> Iterator[Case]:
    """What stands alone where products are many rows, and the rotary that always does."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    pool = KVPool(1, CONTEXT * rows, kv_heads, dim, dtype=HALF, device=device)
    qkv = _random(rows, (heads + 2 * kv_heads) * dim, device=device)
    table = _random(2, CONTEXT, dim, device=device)
    positions = torch.randint(CONTEXT, (rows,), device=device)
    write = torch.arange(rows, device=device) * CONTEXT
    norms = HeadNorms(_random(dim, device=device), _random(dim, device=device), _EPS) if config.qk_norm else None
    keys, values = pool.layers[0]
    yield "rope_and_write", [partial(rope_and_write, qkv, table, positions, write, keys, values, norms)], 2 * qkv.nbytes
    x, delta = _random(2, rows, config.hidden_size, device=device)
    gain = _random(config.hidden_size, device=device)
    yield "add_rms_norm", [partial(add_rms_norm, x, delta, gain, _EPS)], 4 * x.nbytes
    gate_up = _random(rows, 2 * config.intermediate_size, device=device)
    yield "silu_mul", [partial(silu_mul, gate_up)], gate_up.nbytes * 3 // 2


def _acceptance(config: ModelConfig, slots: int, device: torch.device) -> Case:
    """Trees of 16 nodes, of which four in a row are accepted, over all layers."""
    nodes, deep = 16, 4
    planes = _random(2 * config.num_layers, 2 * slots * nodes, config.num_kv_heads * config.head_dim, device=device)
    tokens = torch.ones(slots, nodes, dtype=torch.int64, device=device)
    parents = (torch.arange(nodes, device=device) - 1).expand(slots, nodes).contiguous()
    outcomes = (torch.arange(nodes + 1, device=device) < deep).long().expand(slots, -1).contiguous()
    places = torch.randperm(2 * slots * nodes, device=device).view(2, slots, nodes)
    call = partial(accept_and_move, tokens, parents, outcomes, places[0], places[1], planes)
    return "accept_and_move", [call], 2 * deep * slots * planes[:, 0].nbytes


def _forwards(
    shape: str, rows: Sequence[int], bandwidth: float, context: Context, device: torch.device
) -> Iterator[Row]:
    """Embedding to tokens: one row of each of so many sequences, and so many nodes of one."""
    model = load_model(PREFIX + shape, dtype=HALF, device=device)
    config = model.config
    read = model.weights.keys() - (set() if config.tie_embeddings else {"embedding"})
    weights = sum(model.weights[name].nbytes for name in read)
    for count in rows:
        for kind, sequences in (("decode", count), ("verify", 1)):
            if kind == "decode" or count > 1:
                call = _forward(model, sequences, count // sequences, device)
                cached = KVPool.position_bytes(config.num_layers, config.num_kv_heads, config.head_dim, HALF)
                moved = weights + cached * CONTEXT * sequences + 4 * count * config.vocab_size
                yield _row(f"{shape} {kind} {count}", [call], moved, bandwidth, context)


def _forward(model: Llama, sequences: int, rows: int, device: torch.device) -> Callable[[], Tensor]:
    """The last `rows` tokens of each of so many sequences of CONTEXT tokens, their pages scattered."""
    config, pages = model.config, CONTEXT // _PAGE
    pool = KVPool(
        config.num_layers, sequences * CONTEXT, config.num_kv_heads, config.head_dim, dtype=HALF, device=device
    )
    pool.data.normal_()
    tables = torch.randperm(sequences * pages).view(sequences, pages).tolist()
    last = range(CONTEXT - rows, CONTEXT)
    spans = [Span(table, CONTEXT, rows, (), [table[i // _PAGE] * _PAGE + i % _PAGE for i in last]) for table in tables]
    backend = choose("auto", device, HALF)[0](pool, _PAGE, config.num_heads)
    plan = backend.plan(spans)
    attend = Paged(pool.layers, plan.write, partial(backend.read, plan))
    tokens = torch.randint(config.vocab_size, (sequences * rows,), device=device)
    positions = torch.tensor([*last] * sequences, device=device)
    cold, keys = torch.zeros(len(tokens), device=device), torch.zeros(len(tokens), 3, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def call() -> Tensor:
        hidden = model.forward(tokens, positions, attend)
        return draw_whole(model.logits(hidden), cold, keys, GREEDY_BELOW)

    return call


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=HALF, device=device)


def _weights(outputs: int, inputs: int, device: torch.device) -> list[Tensor]:
    scale = inputs**-0.5
    return [scale * _random(outputs, inputs, device=device) for _ in range(_copies(outputs * inputs * 2))]


def _copies(size_bytes: int) -> int:
    return max(1, math.ceil(_COLD / size_bytes))
