"""Our Triton kernel, in Triton's interpreter, against attention written out row by row."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.attention import Span
from distspec.attention.triton import TritonBackend
from distspec.kv.pool import KVPool
from distspec.models.base import Paged
from tests.unit.attention.test_sdpa import CPU, DIM, LATENTS, by_the_book, compare, random_span

pytestmark = pytest.mark.needs("interpreter")
SIZES = st.lists(st.sampled_from([1, 1, 2, 6, 20]), min_size=1, max_size=4)
HEADS = st.sampled_from([(4, 4), (6, 2), (3, 1)])


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 16, 64]), HEADS, SIZES, st.sampled_from([8, 16, 20]))
def test_rows_see_their_path_and_nothing_else(
    seed: int, page_size: int, heads: tuple[int, int], sizes: list[int], dim: int
) -> None:
    compare(TritonBackend, seed, page_size, heads, sizes, CPU, torch.float32, dim)


@settings(max_examples=6)
@given(st.integers(0, 2**32), st.sampled_from([16, 48]), st.sampled_from([[40], [90], [1, 8], [1, 2, 1, 1]]))
def test_half_precision_is_read_in_wider_blocks(seed: int, page_size: int, sizes: list[int]) -> None:
    """Contexts of several blocks; trees whose scratch has many words; tiles of all widths, and more than programs."""
    compare(TritonBackend, seed, page_size, (6, 2), sizes, CPU, torch.float16, 16, most=600)


@settings(max_examples=10)
@given(st.integers(0, 2**32), st.sampled_from([1, 4, 16, 64]), st.sampled_from([1, 6, 16, 40]), SIZES, LATENTS)
def test_heads_share_latents_of_their_path(
    seed: int, page_size: int, heads: int, sizes: list[int], latent: tuple[int, int]
) -> None:
    """40 heads are two groups, whose programs read the same latents."""
    compare(TritonBackend, seed, page_size, (heads, 1), sizes, CPU, torch.float32, *latent)


def test_long_walks_over_latents_are_merged_a_piece_of_a_row_at_a_time() -> None:
    """As many numbers as DeepSeek's models have, 512 of them the value; each walk is cut into splits."""
    pool = KVPool(1, 256, 1, 576, latent=512, dtype=torch.float32, device=CPU)
    pool.data.normal_()
    spans = [Span([0], 250, 0, ([253],), [253])]
    q = torch.randn(1, 32, 576)
    backend = TritonBackend(pool, 256, 32)
    plan = backend.plan(spans)
    assert plan.launches[0].items[:, 9].tolist() == [3, 3, 3]
    got = backend.read(plan, 0, q)
    torch.testing.assert_close(got.double(), by_the_book(spans, 256, q, *pool.layers[0]), atol=1e-5, rtol=0)


@settings(max_examples=6)
@given(st.integers(0, 2**32), st.sampled_from([1, 4, 16]), HEADS, SIZES)
def test_a_buffer_that_holds_the_integers_of_another_step_is_another_plan(
    seed: int, page_size: int, heads: tuple[int, int], sizes: list[int]
) -> None:
    """As a captured step does it: padded to a bucket, and read from where the step before was read from."""
    draw = random.Random(seed)
    torch.manual_seed(seed % 2**31)
    count = 1000 // page_size + 40
    pool = KVPool(1, count * page_size, heads[1], DIM, dtype=torch.float32, device=CPU)
    pool.data.normal_()
    backend = TritonBackend(pool, page_size, heads[0])
    buffer = torch.full((20_000,), -7)
    plans = {}
    for _ in range(2):
        pages = list(range(count))
        spans = [random_span(draw, pages, page_size, rows) for rows in sizes]
        rows = sum(span.rows for span in spans)
        bucket = backend.bucket(spans, 1 << (rows - 1).bit_length(), scratch=100)
        assert bucket in backend.buckets(bucket.rows, 100)
        integers = torch.tensor(backend.lay_out(spans, bucket))
        buffer[: len(integers)] = integers
        plan = plans.setdefault(bucket, backend.bind(buffer, bucket))
        q, k, v = (torch.randn(bucket.rows, n, DIM) for n in (heads[0], heads[1], heads[1]))
        keys, values = (tensor.clone() for tensor in pool.layers[0])
        got = Paged(pool.layers, plan.write, partial(backend.read, plan))(0, q, k, v)
        where = torch.tensor([at for span in spans for at in span.write])
        keys[where], values[where] = k[:rows], v[:rows]
        assert torch.equal(pool.layers[0][0][:-1], keys[:-1])
        want = by_the_book(spans, page_size, q[:rows], keys, values)
        torch.testing.assert_close(got[:rows].double(), want, atol=1e-5, rtol=0)


def test_a_path_through_scratch_with_holes() -> None:
    """Over three words of the mask, their first and last bits too."""
    pool = KVPool(1, 256, 1, DIM, dtype=torch.float32, device=CPU)
    pool.data.normal_()
    scratch = [50 + offset for offset in (0, 31, 32, 40, 63, 64, 95)]
    spans = [Span([0], 50, 0, tuple(scratch[i % 2 : i + 1 : 2] for i in range(7)), scratch)]
    q = torch.randn(7, 2, DIM)
    backend = TritonBackend(pool, 256, 2)
    got = backend.read(backend.plan(spans), 0, q)
    torch.testing.assert_close(got.double(), by_the_book(spans, 256, q, *pool.layers[0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [1, 8])
def test_more_tiles_than_multiprocessors_share_them(rows: int) -> None:
    """Here there are 3, and one KV head: the fourth span is too many, and in a bucket the fourth row. Splits do not
    count."""
    backend = TritonBackend(KVPool(1, 4096, 1, 16, dtype=torch.float16, device=CPU), 16, 4)
    spans = [Span([*range(64)], 1000, rows, (), [0] * rows)] * 4
    alone, shared = (backend._blocks(backend.plan(some).launches[0]) for some in (spans[:3], spans))
    assert alone > shared
    bucket = backend.bucket(spans[:3], 4 * rows, 0)
    assert backend._blocks(backend.bind(torch.tensor(backend.lay_out(spans[:3], bucket)), bucket).launches[0]) == shared


def test_nodes_above_what_a_bucket_masks_have_none() -> None:
    pool = KVPool(1, 256, 1, DIM, dtype=torch.float32, device=CPU)
    span = Span([0], 4, 0, ([4 + 32],), [36])
    assert TritonBackend(pool, 256, 1).bucket([span], 1, scratch=32) is None
    assert TritonBackend(pool, 256, 1).bucket([span], 1, scratch=33) is not None


@pytest.mark.parametrize("latent", [0, 5])
def test_what_others_hold_cannot_matter_not_even_nan(latent: int) -> None:
    """Nor what lies behind a row that is shorter than what a kernel loads."""
    pool = KVPool(1, 64, 1, DIM, latent=latent, dtype=torch.float32, device=CPU)
    spans = [Span([5, 2], 8, 1, (), [11]), Span([4, 3, 7, 6], 13, 1, (), [24])]
    own = [*range(8, 25), *range(28, 32)]
    pool.data.fill_(torch.nan)
    pool.data[:, :, own] = torch.randn(1, pool.data.shape[1], len(own), 1, DIM)
    backend = TritonBackend(pool, 4, 2)
    out = backend.read(backend.plan(spans), 0, torch.randn(2, 2, DIM))
    assert bool(out.isfinite().all())
