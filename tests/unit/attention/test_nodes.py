"""The second part of attention to trees, in Triton's interpreter, after a first part written out in torch."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distspec.attention import Span
from distspec.attention.nodes import NATURAL, Nodes, shared
from distspec.kv.pool import KVPool
from tests.unit.attention.test_sdpa import CPU, LATENTS, by_the_book, location, random_span

pytestmark = pytest.mark.needs("interpreter")


def first_part(
    spans: list[Span], page_size: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the rows of these spans over the keys that they share: results, and log-sums [heads, rows]. Where there is no
    key, what must not matter."""
    rows, heads, dim = q.shape
    group = heads // keys.shape[1]
    out = torch.full((rows, heads, values.shape[2]), torch.nan)
    log_sums = torch.full((heads, rows), random.Random(rows).choice([-torch.inf, torch.inf]))
    at = 0
    for span in spans:
        where = [location(span, index, page_size) for index in range(shared(span))]
        own = slice(at, at + span.rows)
        if where:
            k, v = (x[where].repeat_interleave(group, 1).float() for x in (keys, values))
            scores = torch.einsum("rhd,khd->hrk", q[own].float(), k) * dim**-0.5
            log_sums[:, own] = scores.logsumexp(-1)
            out[own] = torch.einsum("hrk,khd->rhd", scores.softmax(-1), v)
        at += span.rows
    return out, log_sums


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
    own = [row for span, start in trees for row in range(start, start + span.rows)]
    first, log_sums = first_part([span for span, _ in trees], page_size, q[own], keys, values)
    nodes = Nodes(pool, page_size, num_heads)
    plan = nodes.plan([span for span, _ in trees], [start for _, start in trees])
    out = torch.full((len(q), num_heads, latent or dim), 7.0)
    log_sums, unit = (log_sums * NATURAL, 1.0) if binary else (log_sums, NATURAL)
    nodes.read(plan, 1, q, first, log_sums.t(), unit, out)
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
    first, log_sums = first_part([span], 4, q, *pool.layers[0])
    nodes.read(nodes.plan([span], [0]), 0, q, first, log_sums.t(), NATURAL, out)
    assert bool(out.isfinite().all())
