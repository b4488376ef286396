from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.sampling.noise import gumbel, signed, uniform

word = st.integers(0, 2**64 - 1)


def column(*values: int) -> torch.Tensor:
    return torch.tensor([signed(value) for value in values])


def splitmix64(seed: int, outputs: int) -> list[int]:
    """The published algorithm, in plain integers."""
    out, state = [], seed
    for _ in range(outputs):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        out.append(z ^ z >> 31)
    return out


@given(word, st.integers(0, 7), st.integers(0, 2**31))
def test_the_bits_are_those_of_splitmix64(seed: int, choice: int, position: int) -> None:
    key = splitmix64(seed, 1)[0]
    for part in (choice, position):
        # One output from the state `x` is the finalizer of x + step.
        step = 0x9E3779B97F4A7C15
        key = splitmix64((((key ^ part) * step + 1) - step) % 2**64, 1)[0]
    words = splitmix64(key, 4)
    halves = [half for word in words for half in (word % 2**32, word >> 32)]
    got = uniform(column(seed), column(choice), column(position), 7)[0]
    want = torch.tensor([(half + 0.5) / 2**32 for half in halves[:7]]).clamp(max=1 - 2**-24)
    assert torch.allclose(got, want, rtol=1e-6, atol=0)


@settings(max_examples=30, deadline=None)
@given(word, st.integers(0, 3), st.integers(0, 100_000))
def test_noise_is_finite_and_a_row_does_not_know_its_neighbours(seed: int, choice: int, position: int) -> None:
    alone = gumbel(column(seed), column(choice), column(position), 1001)
    among = gumbel(column(5, seed, seed), column(0, choice, choice), column(9, position, position + 1), 1001)
    assert bool(alone.isfinite().all())
    assert torch.equal(alone[0], among[1])
    assert not torch.equal(alone[0], among[2])
    assert torch.equal(alone[:, :10], gumbel(column(seed), column(choice), column(position), 10))


def test_uniforms_never_reach_0_or_1_and_small_ones_keep_their_steps() -> None:
    many = uniform(torch.arange(64), column(*[0] * 64), column(*[0] * 64), 2**17)
    assert 0 < float(many.min()) < 2**-20
    assert 1 - 2**-20 < float(many.max()) < 1
    small = many[many < 2**-10]
    assert small.unique().numel() > 0.999 * small.numel()


def test_uniforms_are_uniform_and_streams_that_differ_in_one_key_are_uncorrelated() -> None:
    # chi-square of 256 bins over 2**20 draws has mean 255 and deviation 22.6
    keys = [(seed, choice, position) for seed in (0, 1, 2**63) for choice in (0, 1) for position in (0, 1, 2)]
    seed, choice, position = (column(*values) for values in zip(*keys, strict=True))
    many = uniform(seed, choice, position, 2**17)
    for row in many:
        counts = torch.histc(row, 256, 0, 1)
        expected = 2**17 / 256
        assert float(((counts - expected) ** 2 / expected).sum()) < 255 + 6 * 22.6
    correlation = torch.corrcoef(many) - torch.eye(len(keys))
    assert float(correlation.abs().max()) < 6 / 2**8.5
    shifted = torch.corrcoef(torch.stack([many[0, :-1], many[0, 1:]]))
    assert abs(float(shifted[0, 1])) < 6 / 2**8.5
