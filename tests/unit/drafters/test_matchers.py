"""Both matchers against a naive search, whatever was cut and appended before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.drafters.matchers import DeviceMatcher, Edit, HostMatcher, Matcher, Query, Run, lookup

MATCHERS: list[Callable[[int, int], Matcher]] = [
    lambda max_n, min_n: HostMatcher(max_n=max_n, min_n=min_n),
    lambda max_n, min_n: DeviceMatcher(max_n=max_n, min_n=min_n, device=torch.device("cpu")),
]
both = pytest.mark.parametrize("make", MATCHERS, ids=["host", "device"])
tokens = st.lists(st.integers(0, 3), max_size=12)
edits = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1), tokens), min_size=1, max_size=8)


def naive(text: list[int], max_n: int, min_n: int, topk: int, count: int) -> list[Run]:
    """Search backwards, longest suffix first; read on into what was read."""
    found: dict[int, Run] = {}
    for size in range(max_n, min_n - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                full = list(text)
                for i in range(count):
                    full.append(full[end + i])
                found.setdefault(text[end], Run(full[len(text) :], size))
    return list(found.values())[:topk]


@both
@settings(deadline=None)
@given(
    edits=edits,
    path=tokens,
    min_n=st.integers(1, 3),
    more=st.integers(0, 3),
    topk=st.integers(1, 4),
    count=st.integers(1, 6),
)
def test_equals_a_naive_search_after_any_edits(
    make: Callable[[int, int], Matcher],
    edits: list[tuple[int, float, list[int]]],
    path: list[int],
    min_n: int,
    more: int,
    topk: int,
    count: int,
) -> None:
    matcher = make(min_n + more, min_n)
    texts: dict[int, list[int]] = {}
    for request, fraction, appended in edits:
        text = texts.get(request, [])
        keep = round(fraction * len(text))
        texts[request] = text[:keep] + appended
        matcher.write([Edit(request, keep, appended)])
        asked = [Query(r, p) for r in texts for p in ([], path)]
        expected = [naive(texts[q.request] + list(q.path), min_n + more, min_n, topk, count) for q in asked]
        assert matcher.lookup(asked, topk, count) == expected
        assert matcher.lookup(asked, topk, count) == expected  # a path leaves nothing behind


@both
def test_texts_may_outgrow_and_outnumber_any_buffer(make: Callable[[int, int], Matcher]) -> None:
    matcher = make(3, 1)
    text = [i % 700 for i in range(1500)]
    matcher.write([Edit(0, 0, text[:100])])
    matcher.write([Edit(request, 0, [100 + request, 7, 100 + request]) for request in range(1, 40)])
    matcher.write([Edit(0, 100, text[100:])])
    assert matcher.lookup([Query(0, [])], 1, 3) == [[Run([100, 101, 102], 3)]]
    assert matcher.lookup([Query(0, text[100:700])], 1, 2) == [[Run([0, 1], 3)]]
    for request in range(1, 40):
        assert matcher.lookup([Query(request, [])], 1, 2) == [[Run([7, 100 + request], 1)]]


@both
def test_a_forgotten_request_leaves_nothing_to_the_next(make: Callable[[int, int], Matcher]) -> None:
    matcher = make(3, 1)
    matcher.write([Edit(request, 0, [1, 2, 3, 1, 2, 3, 1, 2]) for request in range(8)])
    matcher.forget(3)
    matcher.forget(3)
    matcher.write([Edit(9, 0, [1, 2]), Edit(10, 0, [])])
    assert matcher.lookup([Query(9, []), Query(10, []), Query(4, [])], 1, 1) == [[], [], [Run([3], 3)]]


def test_rows_are_independent_and_what_lies_past_a_text_is_ignored() -> None:
    texts = torch.tensor(
        [[1, 2, 3, 1, 2, 3, 9, 9], [5, 5, 5, 5, 5, 5, 5, 5], [1, 2, 1, 2, 9, 1, 2, 4]], dtype=torch.int32
    )
    runs, sizes = lookup(texts, torch.tensor([5, 0, 4]), max_n=3, min_n=1, topk=2, count=4)
    assert sizes.tolist() == [[2, 0], [0, 0], [2, 0]]
    assert runs[0, 0].tolist() == [3, 1, 2, 3]
    assert runs[2, 0].tolist() == [1, 2, 1, 2]
