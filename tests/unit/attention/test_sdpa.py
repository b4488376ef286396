"""The reference backend against attention written out row by row."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.attention import BACKENDS, AttentionBackend, Span, choose
from distspec.attention.sdpa import SdpaBackend
from distspec.errors import InvalidValue
from distspec.kv.pool import KVPool
from distspec.models.base import Paged

CPU = torch.device("cpu")
DIM = 8
TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.004, torch.bfloat16: 0.03}
"""Of outputs of about 1, or up to 4 where few keys are seen; half precision keeps 11 or 8 bits."""


def location(span: Span, index: int, page_size: int) -> int:
    return span.pages[index // page_size] * page_size + index % page_size


def visible(span: Span, row: int) -> list[int]:
    if row < span.suffix:
        return list(range(span.length - span.suffix + row + 1))
    return [*range(span.length), *span.nodes[row - span.suffix]]


def by_the_book(
    spans: list[Span], page_size: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """One row at a time, in float64; keys, values: [locations, kv_heads, dim], already written. Values may have
    dimensions of their own."""
    rows, _, dim = q.shape
    groups = q.double().view(rows, keys.shape[1], -1, dim)
    out = torch.empty(*groups.shape[:3], values.shape[2], dtype=torch.float64)
    at = 0
    for span in spans:
        for row in range(span.rows):
            where = [location(span, index, page_size) for index in visible(span, row)]
            weights = (torch.einsum("hgd,khd->hgk", groups[at], keys[where].double()) * dim**-0.5).softmax(-1)
            out[at] = torch.einsum("hgk,khd->hgd", weights, values[where].double())
            at += 1
    return out.flatten(1)


def written_and_read(
    backend: AttentionBackend,
    pool: KVPool,
    spans: list[Span],
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """One layer of a step, as an engine does it for a model that leaves the writing to it."""
    plan = backend.plan(spans)
    return Paged(pool.layers, plan.write, partial(backend.read, plan))(layer, q, k, v)


def random_span(draw: random.Random, pages: list[int], page_size: int, rows: int, most: int = 60) -> Span:
    """A span of about `rows` rows over pages taken from the end of `pages`, with a tree that leaves holes. most: keys
    before its rows."""
    nodes = draw.choice([0, 0, draw.randint(1, rows)])
    suffix = max(draw.choice([rows - nodes, 0]), 0 if nodes else 1)
    length = suffix + draw.choice([0, 1, draw.randint(0, most)])
    scratch = draw.sample(range(length, length + 2 * nodes), nodes)
    seen: list[list[int]] = []
    for index in scratch:
        seen.append([*draw.choice([[], *seen]), index])
    count = max(1, -(-(max([length - 1, *scratch]) + 1) // page_size))
    table = [pages.pop() for _ in range(count)]
    if draw.random() < 0.5:
        table.reverse()  # neighbours in rising order may be read in place
    own = [*range(length - suffix, length), *scratch]
    bare = Span(table, length, suffix, tuple(seen), [])
    return Span(table, length, suffix, tuple(seen), [location(bare, index, page_size) for index in own])


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 3, 4, 16, 64]),
    st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    st.lists(st.sampled_from([1, 1, 2, 6, 16, 17, 40]), min_size=1, max_size=5),
    st.sampled_from([None, 1, 20]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rows_see_their_path_and_nothing_else(
    seed: int, page_size: int, heads: tuple[int, int], sizes: list[int], apart: int | None, dtype: torch.dtype
) -> None:
    compare(partial(SdpaBackend, apart=apart), seed, page_size, heads, sizes, CPU, dtype)


LATENTS = st.sampled_from([(24, 16), (28, 20), (12, 8), (50, 32)])
"""Numbers of a latent, and how many of them, the first, are the value."""


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 3, 4, 16, 64]),
    st.sampled_from([1, 3, 16, 40]),
    st.lists(st.sampled_from([1, 1, 2, 6, 16, 17, 40]), min_size=1, max_size=5),
    LATENTS,
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_heads_share_latents_of_their_path(
    seed: int, page_size: int, heads: int, sizes: list[int], latent: tuple[int, int], dtype: torch.dtype
) -> None:
    compare(SdpaBackend, seed, page_size, (heads, 1), sizes, CPU, dtype, *latent)


def compare(
    make: Callable[[KVPool, int, int], AttentionBackend],
    seed: int,
    page_size: int,
    heads: tuple[int, int],
    sizes: list[int],
    device: torch.device,
    dtype: torch.dtype,
    dim: int = DIM,
    latent: int = 0,
    most: int = 60,
) -> None:
    """Random spans of about these sizes: what a backend writes and returns is what the book says. latent: of KVPool;
    most: of random_span."""
    draw, (num_heads, kv_heads) = random.Random(seed), heads
    torch.manual_seed(seed % 2**31)
    pages = list(range((2000 + most * len(sizes)) // page_size + 40))
    pool = KVPool(2, len(pages) * page_size, kv_heads, dim, latent=latent, dtype=dtype, device=device)
    pool.data.normal_()
    spans = [random_span(draw, pages, page_size, rows, most) for rows in sizes]
    rows = sum(span.rows for span in spans)
    q, k, v = (torch.randn(rows, n, dim).to(device, dtype) for n in (num_heads, kv_heads, kv_heads))
    v = k[..., :latent] if latent else v
    keys, values = (tensor.clone() for tensor in pool.layers[1])
    where = torch.tensor([at for span in spans for at in span.write], device=device)
    keys[where], values[where] = k, v

    backend = make(pool, page_size, num_heads)
    before = pool.data[0].clone()
    got = written_and_read(backend, pool, spans, 1, q, k, v)

    assert torch.equal(pool.layers[1][0], keys)
    assert torch.equal(pool.layers[1][1], values)
    assert torch.equal(pool.data[0], before)
    want = by_the_book(spans, page_size, q.cpu(), keys.cpu(), values.cpu())
    torch.testing.assert_close(got.cpu().double(), want, atol=TOLERANCE[dtype], rtol=0)


def test_only_what_not_all_rows_see_needs_a_mask() -> None:
    """Two trees over prefixes of 40 and 50: 39 keys apart, so that every row has a key in the other part too."""
    pool = KVPool(1, 256, 2, DIM, dtype=torch.float32, device=CPU)
    spans = [Span([0], 40, 0, ([40], [40, 41], [42]), [40, 41, 42]), Span([1], 50, 1, ([50], [51]), [177, 178, 179])]
    one, two = (SdpaBackend(pool, 128, 4, apart).plan(spans).calls[0] for apart in (None, 30))
    assert (one.apart, two.apart) == (0, 39)
    assert one.mask is not None
    assert two.mask is not None
    assert one.mask.shape == (2, 1, 6, 52)
    assert torch.equal(two.mask, one.mask[..., 39:])
    assert not one.mask[..., :39].any()


def test_what_others_hold_cannot_matter_not_even_nan() -> None:
    """Padding and gaps must read nothing of a neighbour's pages."""
    pool = KVPool(1, 64, 1, DIM, dtype=torch.float32, device=CPU)
    pool.data[:, :, :8] = torch.nan
    short, long = Span([5, 2], 8, 1, (), [11]), Span([4, 3, 7, 6], 13, 1, (), [24])
    backend = SdpaBackend(pool, 4, 2)
    assert len(backend.plan([short, long]).calls) == 1
    q, k, v = torch.randn(2, 2, DIM), torch.randn(2, 1, DIM), torch.randn(2, 1, DIM)
    out = written_and_read(backend, pool, [short, long], 0, q, k, v)
    assert bool(out.isfinite().all())


def test_spans_share_a_call_only_within_a_factor_of_two() -> None:
    pool = KVPool(1, 4096, 1, DIM, dtype=torch.float32, device=CPU)
    spans = [Span([0], length, 1, (), [length - 1]) for length in (5, 6, 7, 40, 50, 2000)]
    calls = SdpaBackend(pool, 4096, 2).plan(spans).calls
    assert [call.batch for call in calls] == [3, 2, 1]
    assert [call.keys for call in calls] == [7, 50, 2000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_says_why(dtype: torch.dtype) -> None:
    backend, reason = choose("auto", CPU, dtype)
    assert backend is SdpaBackend
    assert reason == "sdpa: Triton kernels need CUDA, the device is cpu"
    assert choose("sdpa", CPU, dtype) == (backend, "sdpa: configured")


def test_mla_is_for_latents_and_nothing_else_is() -> None:
    for name in ("auto", "mla"):
        backend, reason = choose(name, CPU, torch.float32, latent=True)
        assert backend is SdpaBackend
        assert reason == "mla, sdpa: Triton kernels need CUDA, the device is cpu"
    for name in BACKENDS.keys() - {"flashinfer"}:
        with pytest.raises(
            InvalidValue, match=r"engine\.attention_backend.*auto or flashinfer or mla: the model keeps latents"
        ):
            choose(name, CPU, torch.float32, latent=True)
    with pytest.raises(
        InvalidValue, match=r"engine\.attention_backend.*auto or flash or flashinfer or sdpa or triton: the model keeps"
    ):
        choose("mla", CPU, torch.float32)


def test_what_cannot_run_here_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"attention_backend.*need CUDA"):
        choose("triton", CPU, torch.float32)
