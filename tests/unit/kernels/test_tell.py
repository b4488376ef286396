"""Logprobs by kernels against sampling.logprobs; tests/gpu runs the same check compiled."""

from __future__ import annotations

import pytest
import torch

from distspec.kernels.tell import tell_whole
from distspec.sampling.logprobs import tell
from tests.unit.kernels.test_elementwise import CPU

pytestmark = pytest.mark.needs("interpreter")


def check_told(rows: int, vocab: int, most: int, device: torch.device) -> None:
    """Ranks and logprobs are those of the reference; so are the likeliest tokens, but for the order of equals."""
    generator = torch.Generator().manual_seed(vocab + most)
    scores = 3 * torch.randn(rows, vocab, generator=generator)
    scores[::3] = scores[::3].round()  # many equals
    scores[1::2] = scores[1::2].masked_fill(torch.rand(vocab, generator=generator) < 0.95, -torch.inf)
    scores[:, vocab // 2] = 1.0  # something is left
    tokens = torch.randint(vocab, (rows,), generator=generator)
    tokens[1::2] = vocab // 2
    want = tell(scores, tokens, most)
    integers, reals = (part.cpu() for part in tell_whole(scores.to(device), tokens.to(device), most))
    assert torch.equal(integers[:, 0], want.integers[:, 0])
    torch.testing.assert_close(reals, want.reals, atol=1e-5, rtol=1e-5)
    for row in range(rows):
        there = reals[row, 1:] > -torch.inf
        told = integers[row, 1:][there]
        assert len(set(told.tolist())) == int(there.sum())
        assert torch.equal(scores[row, told], scores[row, want.integers[row, 1:][there]])


@pytest.mark.parametrize(("vocab", "most"), [(3, 3), (200, 0), (200, 20), (2500, 5)])
def test_what_is_told_is_the_reference_s(vocab: int, most: int) -> None:
    check_told(4, vocab, most, CPU)
