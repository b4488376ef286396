"""Plans made on the device: chains whose lengths only it knows; tests/gpu runs the same check compiled."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.attention import Places, Span, tiles
from distspec.attention.sdpa import SdpaBackend
from distspec.attention.triton import TritonBackend
from distspec.kv.pool import KVPool
from distspec.models.base import Paged
from tests.unit.attention.test_sdpa import CPU, DIM, TOLERANCE, by_the_book

Heads = tuple[int, int]
HEADS = st.sampled_from([(4, 4), (6, 2), (3, 1)])


def check_chains(
    backend_class: type[SdpaBackend] | type[TritonBackend],
    seed: int,
    page_size: int,
    heads: Heads,
    device: torch.device,
    dtype: torch.dtype,
    longest: int = 90,
) -> None:
    """Chains at random positions, from below 0 on, some of nobody; as one step of several rows, and as several of one.
    What lies in pages that hold nothing of them is no number."""
    draw = random.Random(seed)
    torch.manual_seed(seed % 2**31)
    texts, width, offset, count = 5, longest // page_size + 20, draw.randint(-2, 1), draw.randint(1, 6)
    tables = torch.tensor(draw.sample(range((texts + 1) * width), (texts + 1) * width)).view(-1, width)
    # Some first rows see whole blocks of keys, or one key less.
    ends = [32 * draw.randint(1, 2) - offset - draw.choice([1, 2]) for _ in range(texts + 1)]
    lengths = torch.tensor([draw.choice([1, 2, end, draw.randint(1, longest)]) for end in ends])
    rows = torch.tensor([*draw.sample(range(texts), draw.randint(1, texts)), *[texts] * draw.randint(0, 3)])
    pool = KVPool(1, tables.numel() * page_size, heads[1], DIM, dtype=dtype, device=device)
    pool.data.fill_(torch.nan)
    backend = backend_class(pool, page_size, heads[0])
    places = Places(tables.to(device), lengths.to(device), rows.to(device), offset)
    spans = []
    for row in rows.tolist():
        first = lengths[row].item() + offset
        pages = tables[row].tolist()
        where = [pages[at // page_size] * page_size + at % page_size for at in range(max(0, first + count))]
        for page in {at // page_size for at in where}:
            own = slice(page * page_size, (page + 1) * page_size)
            pool.data[:, :, own] = torch.randn(1, 2, page_size, heads[1], DIM, device=device).to(dtype)
        spans.append(Span(pages, max(0, first + count), min(count, first + count), (), where[max(0, first) :]))
    # Rows of spans: those at positions that there are.
    missing = [max(0, -(lengths[row].item() + offset)) if row < texts else count for row in rows.tolist()]
    real = torch.tensor([i >= gone for gone in missing for i in range(count)])
    spans = [span for span, gone in zip(spans, missing, strict=True) if gone < count]
    q, k, v = (torch.randn(len(real), n, DIM, device=device).to(dtype) for n in (heads[0], heads[1], heads[1]))
    keys, values = (tensor.clone() for tensor in pool.layers[0])
    where = torch.tensor([at for span in spans for at in span.write], dtype=torch.int64, device=device)
    keys[where], values[where] = k[real.to(device)], v[real.to(device)]
    want = by_the_book(spans, page_size, q.cpu()[real], keys.cpu(), values.cpu())

    plan = backend.chains(places, count)
    got = Paged(pool.layers, plan.write, partial(backend.read, plan))(0, q, k, v)
    assert torch.equal(pool.layers[0][0][:-1].nan_to_num(9), keys[:-1].nan_to_num(9))
    torch.testing.assert_close(got.cpu()[real].double(), want, atol=TOLERANCE[dtype], rtol=0)

    stepwise = torch.empty_like(got)
    for step, plan in enumerate(backend.steps(places, count)):
        own = slice(step, None, count)
        attend = Paged(pool.layers, plan.write, partial(backend.read, plan))
        stepwise[own] = attend(0, q[own], k[own], v[own])
    torch.testing.assert_close(stepwise.cpu()[real].double(), want, atol=TOLERANCE[dtype], rtol=0)


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.sampled_from([1, 4, 16]), HEADS)
def test_chains_see_what_lies_before_them(seed: int, page_size: int, heads: Heads) -> None:
    check_chains(SdpaBackend, seed, page_size, heads, CPU, torch.float32)


@pytest.mark.needs("interpreter")
@settings(max_examples=6)
@given(st.integers(0, 2**32), st.sampled_from([1, 4, 16]), HEADS)
def test_a_plan_of_the_device_does_the_same(seed: int, page_size: int, heads: Heads) -> None:
    check_chains(TritonBackend, seed, page_size, heads, CPU, torch.float32)


@pytest.mark.needs("interpreter")
@settings(max_examples=20)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(1, 20), st.booleans())
def test_walks_are_cut_as_the_host_would_cut_them(lengths: list[int], count: int, stepwise: bool) -> None:
    pool = KVPool(1, 4000, 1, DIM, dtype=torch.float32, device=CPU)
    backend = TritonBackend(pool, 16, 4)
    tables = torch.zeros(len(lengths) + 1, 40, dtype=torch.int64)
    places = Places(tables, torch.tensor([*lengths, 0]), torch.arange(len(lengths)), 0)
    plan = backend.steps(places, count)[0] if stepwise else backend.chains(places, count)
    lanes = plan.launches[0].lanes
    grid = backend._grid(lanes)
    rows = 1 if stepwise else count
    spans = [Span([], length + count, rows, (), [0] * rows) for length in lengths]
    found = tiles.tiles(spans, [40 * i for i in range(len(lengths))], grid.rows)
    # Stepwise, every step has the items of one whose rows see most; least are those of the first.
    work = [replace(tile, least=tile.least - (count - 1) * stepwise) for own in found for tile in own]
    want = torch.tensor(tiles.items(work, grid)).view(-1, tiles.FIELDS)
    got = plan.launches[0].items
    got = got[got[:, 1] > 0]
    compared = [0, 1, 2, 4, 5, 6, 8, 9]
    assert sorted(got[:, compared].tolist()) == sorted(want[:, compared].tolist())
    split = got[(got[:, 9] > 1)]
    taken = (split[:, 7] + split[:, 8]).tolist()
    assert sorted(taken) == list(range(len(taken)))
    assert len(taken) <= grid.programs
