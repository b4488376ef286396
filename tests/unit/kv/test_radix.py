from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.kv.pages import PageAllocator
from distspec.kv.radix import PrefixCache


def cached(num_pages: int = 16, page_size: int = 2) -> tuple[PageAllocator, PrefixCache]:
    pages = PageAllocator(num_pages, page_size)
    return pages, PrefixCache(pages)


def put(pages: PageAllocator, cache: PrefixCache, tokens: list[int]) -> list[int]:
    """Insert as a request that ends would: its pages are then the cache's alone."""
    mine = pages.allocate(len(tokens) // pages.page_size)
    cache.insert(tokens, mine)
    pages.release(mine)
    return mine


def test_the_longest_prefix_of_whole_pages_is_found() -> None:
    pages, cache = cached()
    mine = put(pages, cache, [1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4, 5]) == mine
    assert cache.match([1, 2, 3]) == mine[:1]
    assert cache.match([1, 2, 9, 4]) == mine[:1]
    assert cache.match([2, 1]) == []
    assert pages.references(mine[0]) == 4


def test_the_same_tokens_are_not_stored_twice() -> None:
    pages, cache = cached()
    first = put(pages, cache, [1, 2, 3, 4])
    second = put(pages, cache, [1, 2, 3, 4, 5, 6])
    assert cache.held == 3
    assert cache.match([1, 2, 3, 4, 5, 6]) == [*first, second[2]]
    assert pages.free == 13


def test_a_partial_page_is_refused() -> None:
    pages, cache = cached()
    with pytest.raises(ValueError, match="exactly"):
        cache.insert([1, 2, 3], pages.allocate(2))


def test_the_least_recently_used_leaf_leaves_first_and_a_held_page_stays() -> None:
    pages, cache = cached()
    put(pages, cache, [1, 2, 3, 4])
    put(pages, cache, [1, 2, 5, 6])
    put(pages, cache, [7, 8])
    held = cache.match([1, 2, 3, 4])
    assert cache.evict(1) == 1
    assert cache.match([1, 2, 5, 6]) == held[:1]
    pages.release(held[:1])
    assert cache.evict(5) == 1
    assert cache.match([7, 8]) == []
    pages.release(held)
    assert cache.evict(5) == 2
    assert (cache.held, pages.free) == (0, 16)


@given(st.data(), st.integers(1, 3))
def test_a_match_is_the_longest_prefix_ever_inserted_and_still_held(data: st.DataObject, page_size: int) -> None:
    pages, cache = cached(64, page_size)
    texts = st.lists(st.integers(0, 1), max_size=4 * page_size).map(lambda t: t[: len(t) // page_size * page_size])
    known: set[tuple[int, ...]] = set()
    for text in data.draw(st.lists(texts, max_size=12)):
        put(pages, cache, text)
        known |= {tuple(text[:end]) for end in range(page_size, len(text) + 1, page_size)}
        assert cache.held == len(known) == 64 - pages.free
    probe = data.draw(st.lists(st.integers(0, 1), max_size=5 * page_size))
    longest = max((len(text) for text in known if text == tuple(probe[: len(text)])), default=0)
    found = cache.match(probe)
    assert len(found) == longest // page_size
    assert cache.evict(64) <= len(known) - len(found)
    assert cache.match(probe) == found
    pages.release(found * 2)
    cache.evict(64)
    assert pages.free == 64
