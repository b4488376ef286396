from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.errors import OutOfPages
from distspec.kv.pages import PageAllocator


def test_a_refused_allocation_takes_nothing() -> None:
    pages = PageAllocator(3, 4)
    pages.allocate(2)
    with pytest.raises(OutOfPages) as caught:
        pages.allocate(2)
    assert (caught.value.need, caught.value.free) == (2, 1)
    assert pages.free == 1


def test_a_fresh_pool_hands_out_neighbours_in_order() -> None:
    assert PageAllocator(5, 1).allocate(4) == [0, 1, 2, 3]


@pytest.mark.parametrize("operation", ["share", "release"])
def test_a_free_page_is_neither_shared_nor_released(operation: str) -> None:
    pages = PageAllocator(2, 1)
    with pytest.raises(ValueError, match="free"):
        getattr(pages, operation)([1])
    assert pages.free == 2


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 7)), max_size=60))
def test_a_page_is_free_exactly_while_nobody_holds_it(operations: list[tuple[str, int]]) -> None:
    pages = PageAllocator(8, 2)
    holders = [0] * 8
    for name, number in operations:
        if name == "allocate":
            if number <= pages.free:
                for page in pages.allocate(number):
                    assert holders[page] == 0
                    holders[page] = 1
        elif holders[number]:
            getattr(pages, name)([number])
            holders[number] += 1 if name == "share" else -1
        assert [pages.references(page) for page in range(8)] == holders
        assert pages.free == holders.count(0)
