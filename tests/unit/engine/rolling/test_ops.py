"""What rounds make up on the device is what distspec.synthetic says."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from distspec import synthetic
from distspec.engine.rolling.ops import below, make_up
from distspec.sampling.noise import signed

seeds = st.integers(0, 2**64 - 1)
odds = st.one_of(st.sampled_from([0.0, 0.5, 0.8, 1.0]), st.floats(0, 1))


@given(st.lists(st.tuples(seeds, st.integers(0, 9), st.integers(0, 2**31)), min_size=1), st.integers(2, 2**18), odds)
def test_outcomes_and_first_guesses_are_those_of_the_host(
    rows: list[tuple[int, int, int]], vocab: int, share: float
) -> None:
    integers = torch.tensor([(0, signed(seed), choice, position) for seed, choice, position in rows])
    tokens = [position * 7919 % vocab for _, _, position in rows]
    keys = [(*row, token, vocab) for row, token in zip(rows, tokens, strict=True)]
    assert make_up(integers, torch.tensor(tokens), vocab).tolist() == [synthetic.outcome(*key) for key in keys]
    guesses = [synthetic.guesses(*key, [share], 1)[0] for key in keys]
    assert make_up(integers, torch.tensor(tokens), vocab, share).tolist() == guesses


@given(odds, st.integers(-3, 3))
def test_a_share_ends_where_division_says(share: float, away: int) -> None:
    number = min(max(below(share) + away, 0), 2**64 - 1)
    assert (number < below(share)) == (number / 2**64 < share) or below(share) == 2**64 - 1
