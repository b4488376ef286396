"""The attention backends on a GPU: the reference in one part and in two, our Triton kernel, and packages."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from distspec.attention import choose
from distspec.attention.flash import FlashBackend
from distspec.attention.flashinfer import FlashInferBackend
from distspec.attention.sdpa import SdpaBackend
from distspec.attention.triton import TritonBackend
from tests.unit.attention.test_sdpa import compare

pytestmark = pytest.mark.needs("gpu")
CUDA = torch.device("cuda")
SIZES = [1, 1, 2, 6, 16, 17, 40, 140]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("apart", [None, 1, 20])
@pytest.mark.parametrize("seed", range(6))
def test_rows_see_their_path_and_nothing_else(seed: int, page_size: int, apart: int | None, dtype: torch.dtype) -> None:
    sizes = random.Random(seed).choices(SIZES, k=4)
    make = partial(SdpaBackend, apart=apart)
    compare(make, seed, page_size, [(4, 4), (6, 2), (3, 1)][seed % 3], sizes, CUDA, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page_size", "dim", "heads"), [(1, 8, (6, 2)), (16, 128, (16, 8)), (64, 96, (8, 1))])
def test_triton_too(page_size: int, dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    for seed in range(3):
        compare(TritonBackend, seed, page_size, heads, random.Random(seed).choices(SIZES, k=4), CUDA, dtype, dim)


@pytest.mark.parametrize("sizes", [[1], [8], [64], [64] * 9, [1] * 70, [8] * 40], ids=str)
@pytest.mark.parametrize(("dim", "heads"), [(128, (32, 8)), (64, (16, 8)), (128, (64, 8))])
def test_triton_over_many_blocks(sizes: list[int], dim: int, heads: tuple[int, int]) -> None:
    """Every shape of its programs: for one row and for trees, alone on a multiprocessor and not."""
    compare(TritonBackend, len(sizes), 16, heads, sizes, CUDA, torch.bfloat16, dim, most=1500)


@pytest.mark.parametrize("backend", [SdpaBackend, TritonBackend])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page_size", "heads"), [(1, 6), (4, 16), (16, 40), (64, 128)])
@pytest.mark.parametrize("latent", [(576, 512), (50, 32)])
def test_heads_share_latents(
    backend: type[SdpaBackend] | type[TritonBackend],
    page_size: int,
    heads: int,
    latent: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """128 heads are two groups, or four in float32."""
    for seed in range(3):
        sizes = random.Random(seed).choices(SIZES, k=4)
        compare(backend, seed, page_size, (heads, 1), sizes, CUDA, dtype, *latent)


@pytest.mark.needs("flash")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("page_size", "dim", "heads"), [(16, 64, (6, 2)), (16, 128, (16, 8)), (64, 128, (8, 1))])
def test_flash_too(page_size: int, dim: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    for seed in range(6):
        compare(FlashBackend, seed, page_size, heads, random.Random(seed).choices(SIZES, k=4), CUDA, dtype, dim)


@pytest.mark.needs("flashinfer")
@pytest.mark.parametrize("page_size", [1, 16])
def test_flashinfer_too(page_size: int) -> None:
    """Chunks of 128 rows and more go to another of its kernels. Each dtype and dimension is another to compile."""
    for seed in range(6):
        sizes = random.Random(seed).choices(SIZES, k=4)
        compare(FlashInferBackend, seed, page_size, (16, 8), sizes, CUDA, torch.bfloat16, 128)


@pytest.mark.needs("flashinfer")
@pytest.mark.parametrize(("page_size", "heads"), [(1, 6), (16, 40), (64, 128)])
def test_flashinfer_reads_latents_too(page_size: int, heads: int) -> None:
    for seed in range(3):
        sizes = random.Random(seed).choices(SIZES, k=4)
        compare(FlashInferBackend, seed, page_size, (heads, 1), sizes, CUDA, torch.bfloat16, 576, 512)


def test_auto_is_triton() -> None:
    backend, reason = choose("auto", CUDA, torch.bfloat16)
    assert backend is TritonBackend
    assert reason.startswith("triton: ")
