"""The fused kernels compiled: what tests/unit/kernels checks in the interpreter, at sizes that models have."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from distspec.attention import Span
from distspec.attention.sdpa import SdpaBackend
from distspec.kernels.product import room
from distspec.kernels.tiles import Tile, tile
from distspec.kv.pool import KVPool
from distspec.models import ModelConfig, random_model
from distspec.models.base import Paged, Taps
from distspec.models.llama import Llama
from tests.shapes import LLAMA
from tests.unit.kernels.test_accept import check_accept
from tests.unit.kernels.test_edit import check_edits
from tests.unit.kernels.test_elementwise import check_norm, check_rope, check_rope_writes_numbers, check_silu
from tests.unit.kernels.test_latent import check_latents, check_latents_are_numbers
from tests.unit.kernels.test_linear import check_linear
from tests.unit.kernels.test_nucleus import check_nucleus
from tests.unit.kernels.test_sample import check_best, check_draw, check_unfit
from tests.unit.kernels.test_tell import check_told
from tests.unit.kernels.test_truncate import check_kept

pytestmark = pytest.mark.needs("gpu")
CUDA = torch.device("cuda")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SHAPE = replace(
    LLAMA,
    hidden_size=512,
    intermediate_size=1536,
    num_heads=8,
    head_dim=64,
    vocab_size=4099,
    max_position=512,
    tie_embeddings=True,
)


@DTYPES
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_norm_silu_and_rotary(rows: int, dtype: torch.dtype) -> None:
    for width in (1024, 5120):
        check_norm(rows, width, CUDA, dtype)
    check_silu(rows, 3000, CUDA, dtype)
    for heads, dim, normed in (((16, 8), 128, True), ((32, 8), 64, False), ((64, 8), 128, True), ((5, 5), 80, False)):
        check_rope(rows, heads, dim, normed, CUDA, dtype)
    for count in (5, 16, 128):
        check_latents(rows, count, 512, 64, CUDA, dtype, plain_dim=128)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pages_hold_numbers_whatever_a_model_computes(dtype: torch.dtype) -> None:
    check_rope_writes_numbers(CUDA, dtype)
    check_latents_are_numbers(CUDA, dtype)


@DTYPES
@pytest.mark.parametrize("after", ["bias", "gated", "residual", "prepared"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 16, 40, 64])
def test_products(rows: int, normed: bool, after: str, dtype: torch.dtype) -> None:
    """Tiles of any kind; in float32 without TF32."""
    shapes = [Tile(16, 64, 64, 1, 3, 4), Tile(64, 64, 64, 1, 3, 4)]
    shapes += [Tile(1, 4, 1024, 1, 3, 4), Tile(1, 1, 4096, 1, 1, 4)] if rows < 3 else []
    shapes += [Tile(16, 16, 64, 4, 2, 4), Tile(64, 64, 64, 1, 3, 4, apart=3)] if after != "gated" else []
    for shape in shapes:
        check_linear(rows, (1024, 3072) if normed else (520, 1000), normed, after, CUDA, dtype, shape)


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 24, 40, 64])
def test_the_tiles_in_use(rows: int) -> None:
    for outputs, inputs in ((4096, 1024), (1024, 3072), (6144, 4096), (4096, 14336), (2048, 8192), (5120, 8192)):
        for gated in (False, True):
            shape = tile(rows, outputs, inputs, gated, room(CUDA))
            if shape is not None:
                after = "gated" if gated else "residual"
                check_linear(rows, (outputs, inputs), gated, after, CUDA, torch.bfloat16, shape)


@pytest.mark.parametrize("vocab", [997, 151936])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_draws(vocab: int, spread: float) -> None:
    check_draw(96, vocab, spread, CUDA)
    for most in (1, 5, 16):
        check_best(9, vocab, most, CUDA)


@pytest.mark.parametrize("vocab", [997, 151936])
def test_draws_from_what_is_no_number(vocab: int) -> None:
    check_unfit(vocab, CUDA)


@pytest.mark.parametrize("vocab", [5, 997, 128256, 151936])
@pytest.mark.parametrize("most", [0, 1, 5, 20])
def test_logprobs(vocab: int, most: int) -> None:
    check_told(70, vocab, min(vocab, most), CUDA)


@pytest.mark.parametrize("vocab", [5, 997, 151936])
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_nuclei(vocab: int, spread: float) -> None:
    for seed in range(3):
        check_nucleus(seed, 200, vocab, spread, CUDA)


@pytest.mark.parametrize("vocab", [997, 128256, 151936])
@pytest.mark.parametrize("depth", [0, 1, 7])
def test_edits(vocab: int, depth: int) -> None:
    for seed in range(3):
        check_edits(seed, 17, vocab, depth, CUDA)


@pytest.mark.parametrize("vocab", [997, 151936])
@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
def test_what_stays(vocab: int, spread: float) -> None:
    check_kept(60, vocab, spread, CUDA)


@DTYPES
def test_acceptance(dtype: torch.dtype) -> None:
    for nodes in (1, 4, 16, 64):
        for seed in range(8):
            check_accept(seed, 5, nodes, 1000, CUDA, dtype)


def _last(model: Llama, config: ModelConfig, lengths: list[int], taps: Taps, plain: bool) -> Tensor:
    """Logits of every row of prompts of these lengths, then of one row of each, over scattered pages."""
    pool = KVPool(config.num_layers, 1024, config.num_kv_heads, config.head_dim, dtype=model.dtype, device=CUDA)
    backend, found = SdpaBackend(pool, 16, config.num_heads), []
    tables = torch.randperm(64, generator=torch.Generator().manual_seed(1)).view(len(lengths), -1).tolist()
    for decode in (False, True):
        ends = [length + decode for length in lengths]
        rows = [range(length if decode else 0, end) for length, end in zip(lengths, ends, strict=True)]
        spans = [
            Span(table, end, len(at), (), [table[i // 16] * 16 + i % 16 for i in at])
            for table, end, at in zip(tables, ends, rows, strict=True)
        ]
        plan = backend.plan(spans)
        paged = Paged(pool.layers, plan.write, partial(backend.read, plan))
        positions = torch.tensor([i for at in rows for i in at], device=CUDA)
        tokens = (positions * 7919 + 3) % config.vocab_size
        hidden = model.forward(tokens, positions, paged.__call__ if plain else paged, taps)
        found.append(model.logits(hidden))
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_a_fused_model_is_the_plain_one(kind: str) -> None:
    """In bfloat16 as near to float32 as the plain layers are, for prompts and for single rows, and so are its taps."""
    config = replace(SHAPE, model_type=kind, attention_bias=kind == "qwen2")
    exact = random_model(config, seed=4, dtype=torch.float32, device=CUDA)
    model = Llama(config, {name: weight.bfloat16() for name, weight in exact.weights.items()})
    exact = Llama(config, {name: weight.float() for name, weight in model.weights.items()})
    for lengths in ([5], [40, 3, 100, 7], [200, 100]):
        taps = [Taps((0, 2, 3)) for _ in range(3)]
        want = _last(exact, config, lengths, taps[0], plain=True)
        fused, plain = (_last(model, config, lengths, taps[1 + i], plain=bool(i)) for i in range(2))
        errors = [float((found - want).norm() / want.norm()) for found in (fused, plain)]
        assert errors[0] < 1.2 * errors[1] + 1e-3
        errors = [float((tap.features() - taps[0].features()).norm()) for tap in taps[1:]]
        assert errors[0] < 1.2 * errors[1] + 1e-3
