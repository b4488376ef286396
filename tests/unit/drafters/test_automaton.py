"""The suffix automaton against a naive search of the text."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from distspec.drafters.automaton import BREAK, START, Automaton, Cursor, Library

texts = st.integers(1, 4).flatmap(lambda symbols: st.lists(st.integers(0, symbols - 1), max_size=60))
bounds = st.integers(1, 6)


def occurrences(text: list[int], string: list[int]) -> list[int]:
    """Where the text stands after each."""
    return [end for end in range(len(string), len(text) + 1) if text[end - len(string) : end] == string]


def longest(text: list[int], walked: list[int], most: int) -> int:
    """Length of the longest suffix of `walked` that occurs in the text."""
    return next(n for n in range(min(most, len(walked)), -1, -1) if occurrences(text, walked[len(walked) - n :]))


def build(text: list[int], max_match: int) -> Automaton:
    automaton = Automaton(max_match)
    automaton.extend(text)
    return automaton


def naive_followers(text: list[int], string: list[int]) -> dict[int, tuple[int, int]]:
    """Of each token that followed: count, latest."""
    ends = {token: occurrences(text, [*string, token]) for token in set(text)}
    return {token: (len(found), found[-1]) for token, found in ends.items() if found}


def check_match(automaton: Automaton, cursor: Cursor, text: list[int], walked: list[int], length: int) -> None:
    """`cursor` is the match of that length at the end of `walked`, and its suffixes have their true followers."""
    assert cursor.length == length
    lengths = [shorter.length for shorter in automaton.shorter(cursor)]
    assert lengths == sorted({n for n in lengths if 0 < n <= length}, reverse=True)
    for shorter in automaton.shorter(cursor):
        found = automaton.followers(shorter)
        string = walked[len(walked) - shorter.length :]
        assert {f.token: (f.times, f.latest) for f in found} == naive_followers(text, string)
        assert len(found) == len({f.token for f in found})


@settings(deadline=None)
@given(texts, bounds)
@example([0] * 30, 3)
@example([0, 1] * 15, 2)
def test_the_end_matches_the_longest_suffix_that_occurred_before(text: list[int], max_match: int) -> None:
    automaton = Automaton(max_match)
    for n, token in enumerate(text):
        automaton.extend([token])
        here = text[: n + 1]
        check_match(automaton, automaton.end, here, here, longest(text[:n], here, max_match))
    assert len(automaton) == len(text)


@settings(deadline=None)
@given(texts, texts, bounds)
def test_a_path_is_matched_by_walking_and_changes_nothing(text: list[int], path: list[int], max_match: int) -> None:
    automaton = build(text, max_match)
    end, cursor = automaton.end, START
    for n, token in enumerate(path):
        cursor = automaton.step(cursor, token)
        assert cursor == automaton.walk(path[: n + 1])
    check_match(automaton, cursor, text, path, longest(text, path, max_match))
    assert automaton.end == end
    assert len(automaton) == len(text)


@settings(deadline=None)
@given(texts, texts, bounds)
def test_a_walk_goes_on_from_the_end(text: list[int], path: list[int], max_match: int) -> None:
    """The end of the text matches where it occurred before, and so does what hangs below it."""
    automaton = build(text, max_match)
    cursor = automaton.end
    suffix = text[len(text) - cursor.length :]
    check_match(automaton, automaton.walk(path, cursor), text, suffix + path, longest(text, suffix + path, max_match))


@settings(deadline=None)
@given(st.lists(texts, max_size=5), texts, bounds)
def test_no_match_runs_across_a_break(parts: list[list[int]], path: list[int], max_match: int) -> None:
    automaton = Automaton(max_match)
    for part in parts:
        automaton.extend([*part, BREAK])
    cursor = automaton.walk(path)
    assert cursor.length == max((longest(part, path, max_match) for part in parts), default=0)
    if not cursor.length:
        return
    counts: dict[int, int] = {}
    for part in parts:
        for token, (count, _) in naive_followers(part, path[len(path) - cursor.length :]).items():
            counts[token] = counts.get(token, 0) + count
    assert {f.token: f.times for f in automaton.followers(cursor)} == counts


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(4, 64))
def test_a_library_holds_the_newest_texts_within_its_bound(sizes: list[int], most: int) -> None:
    library = Library(8, most)
    added: list[int] = []
    for size in sizes:
        text = list(range(len(added), len(added) + size))  # no token twice, so each is found if it is held
        library.add(text)
        added += text
        assert len(library) <= most
    held = [any(a.walk([token]).length for a in library.automata) for token in added]
    first = held.index(True)
    assert sum(held[first:]) >= min(sizes[-1], most // 2 - 1)
    assert held[-1]
    assert sum(held) < len(library)  # the breaks are counted
