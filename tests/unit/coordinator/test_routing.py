"""The prefix index against a plain list of what each worker has seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distspec.coordinator.routing import PrefixIndex

texts = st.lists(st.integers(0, 1), max_size=9).map(tuple)


@given(st.lists(st.tuples(st.sampled_from("ab"), texts), max_size=8), texts)
def test_it_knows_the_longest_prefix_in_whole_blocks(
    notes: list[tuple[str, tuple[int, ...]]], text: tuple[int]
) -> None:
    index = PrefixIndex(block=2)
    for worker, seen in notes:
        index.note(worker, seen)
    for worker in "ab":
        whole = {seen[:n] for name, seen in notes if name == worker for n in range(0, len(seen) + 1, 2)}
        longest = max(n for n in range(0, len(text) + 1, 2) if n == 0 or text[:n] in whole)
        assert index.matched(worker, text) == longest


def test_blocks_match_only_behind_what_came_before_them() -> None:
    index = PrefixIndex(block=2)
    index.note("a", (1, 2, 3, 4))
    assert index.matched("a", (9, 9, 3, 4)) == 0


def test_the_least_recently_seen_goes_first() -> None:
    index = PrefixIndex(block=1, blocks_per_worker=2)
    index.note("a", (1,))
    index.note("a", (2,))
    index.note("a", (1,))
    index.note("a", (3,))
    assert [index.matched("a", (token,)) for token in (1, 2, 3)] == [1, 0, 1]


def test_a_worker_that_left_has_seen_nothing() -> None:
    index = PrefixIndex(block=1)
    index.note("a", (1,))
    index.forget("a")
    assert index.matched("a", (1,)) == 0
