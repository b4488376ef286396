"""Synthetic acceptance: guesses are right as often as one says, and wrong otherwise."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.synthetic import guesses, outcome

KEYS = st.tuples(st.integers(0, 2**63), st.integers(0, 7), st.integers(0, 2**31), st.integers(-1, 2**17))


@given(KEYS, st.integers(4, 2**17), st.integers(1, 3))
def test_guesses_are_different_tokens_and_fewer_are_a_prefix_of_more(
    key: tuple[int, int, int, int], vocab: int, topk: int
) -> None:
    three = guesses(*key, vocab, (0.5, 0.3, 0.1), 3)
    assert len(set(three)) == 3
    assert all(0 <= token < vocab for token in three)
    assert guesses(*key, vocab, (0.5, 0.3, 0.1), topk) == three[:topk]


@pytest.mark.parametrize("vocab", [4, 32_768])
def test_each_guess_is_right_as_often_as_its_odds_say(vocab: int) -> None:
    odds, trials = (0.8, 0.1, 0.03), 20_000
    right: Counter[int] = Counter()
    for position in range(trials):
        last = outcome(1, 0, position, 7, vocab)
        token = outcome(1, 0, position + 1, last, vocab)
        right.update(r for r, guess in enumerate(guesses(1, 0, position + 1, last, vocab, odds, 3)) if guess == token)
    for rank, share in enumerate(odds):
        assert right[rank] / trials == pytest.approx(share, abs=4 * (share * (1 - share) / trials) ** 0.5)


@given(KEYS, st.integers(2, 1000))
def test_odds_of_one_and_of_nothing_are_kept_to_always(key: tuple[int, int, int, int], vocab: int) -> None:
    token = outcome(*key, vocab)
    assert guesses(*key, vocab, (1.0,), 1) == [token]
    assert token not in guesses(*key, vocab, (), 5)
    assert token not in guesses(*key, vocab, (0.0, 0.0), 5)


@pytest.mark.parametrize("part", range(4))
def test_the_outcome_depends_on_every_part_of_its_key(part: int) -> None:
    key = [3, 0, 100, 12]
    other = [value + (i == part) for i, value in enumerate(key)]
    assert outcome(*key, 2**30) != outcome(*other, 2**30)
