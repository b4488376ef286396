"""The second part of attention to trees, in Triton's interpreter, after a first part written out in torch."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distspec.attention import Span
from distspec.attention.nodes import NATURAL, Nodes
from distspec.kv.pool import KVPool
from tests.unit.attention.test_sdpa import CPU, LATENTS, by_the_book, location, random_span

pytestmark = pytest.mark.needs("interpreter")


def first_part(
    spans: list[Span], page_size: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over the keys that all rows of a span see: results [rows, heads, dim] and log-sums [rows, heads]."""
    group = q.shape[1] // keys.shape[1]
    results, log_sums = [], []
    for span, own in zip(spans, q.split([span.rows for span in spans]), strict=True):
        where = [location(span, index, page_size) for index in range(span.length - span.suffix)]
        k, v = (x[where].repeat_interleave(group, 1) for x in (keys, values))
        scores = torch.einsum("rhd,khd->hrk", own, k) * q.shape[2] ** -0.5
        log_sums.append(scores.logsumexp(-1))
        results.append(torch.einsum("hrk,khd->rhd", scores.softmax(-1), v))
    return torch.cat(results), torch.cat(log_sums, 1).t()


def check(
    seed: int, page_size: int, heads: tuple[int, int], sizes: list[int], dim: int, latent: int, binary: bool
) -> None:
    """Trees among spans of other rows, which stay as they are."""
    draw, (num_heads, kv_heads) = random.Random(seed), heads
    torch.manual_seed(seed % 2**31)
    pages = list(range(1000 // page_size + 40))
    pool = KVPool(2, len(pages) * page_size, kv_heads, dim, latent=latent, dtype=torch.float32, device=CPU)
    pool.data.normal_()
    spans = [random_span(draw, pages, page_size, rows) for rows in sizes]
    q = torch.randn(sum(span.rows for span in spans), num_heads, dim)
    keys, values = pool.layers[1]
    want = by_the_book(spans, page_size, q, keys, values).view(len(q), num_heads, -1)

    starts = [sum(span.rows for span in spans[:i]) for i in range(len(spans))]
    trees = [(span, start) for span, start in zip(spans, starts, strict=True) if span.nodes]
    assume(trees)
    trees.sort(key=lambda tree: tree[0].length == tree[0].suffix)
    read = [(span, start) for span, start in trees if span.length > span.suffix]
    own, first = ([row for span, start in some for row in range(start, start + span.rows)] for some in (trees, read))
    found = first_part([span for span, _ in read], page_size, q[first], keys, values) if read else None
    unit = 1.0 if binary else NATURAL
    if found is not None and binary:
        found = found[0], found[1] * NATURAL
    nodes = Nodes(pool, page_size, num_heads)
    out = torch.full((len(q), num_heads, latent or dim), 7.0)
    nodes.read(nodes.plan([span for span, _ in trees], [start for _, start in trees]), 1, q, found, unit, out)
    torch.testing.assert_close(out[own].double(), want[own], atol=1e-5, rtol=0)
    others = [row for row in range(len(q)) if row not in own]
    assert bool((out[others] == 7).all())


@settings(max_examples=25)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 3, 16, 64]),
    st.sampled_from([(4, 4), (6, 2), (3, 1)]),
    st.lists(st.sampled_from([1, 2, 6, 20, 40]), min_size=1, max_size=4),
    st.sampled_from([8, 16, 20]),
    st.booleans(),
)
def test_rows_go_on_above_what_they_share(
    seed: int, page_size: int, heads: tuple[int, int], sizes: list[int], dim: int, binary: bool
) -> None:
    check(seed, page_size, heads, sizes, dim, 0, binary)


@settings(max_examples=10)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 16]),
    st.sampled_from([1, 6, 40]),
    st.lists(st.sampled_from([1, 6, 20]), min_size=1, max_size=3),
    LATENTS,
)
def test_over_latents_too(seed: int, page_size: int, heads: int, sizes: list[int], latent: tuple[int, int]) -> None:
    check(seed, page_size, (heads, 1), sizes, *latent, binary=False)


def test_what_others_hold_cannot_matter_not_even_nan() -> None:
    pool = KVPool(1, 64, 1, 8, dtype=torch.float32, device=CPU)
    span = Span([5, 2], 4, 1, ([4], [5]), [])
    pool.data.fill_(torch.nan)
    pool.data[:, :, [20, 21, 22, 23, 8, 9]] = torch.randn(1, 2, 6, 1, 8)
    q = torch.randn(3, 2, 8)
    nodes, out = Nodes(pool, 4, 2), torch.empty(3, 2, 8)
    nodes.read(nodes.plan([span], [0]), 0, q, first_part([span], 4, q, *pool.layers[0]), NATURAL, out)
    assert bool(out.isfinite().all())
