"""Edits by kernels against those of sampling/edits.py, to the bit; tests/gpu runs the same check compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.kernels.edit import add_bias_, mask_, penalize_
from distspec.sampling.edits import IN_PROMPT, Bias, Mask, Penalties, packed
from tests.unit.kernels.test_elementwise import CPU

pytestmark = pytest.mark.needs("interpreter")


def check_edits(seed: int, rows: int, vocab: int, depth: int, device: torch.device) -> None:
    """Some rows of several slots. Paths hold tokens of the text, others, and each other's."""
    torch.manual_seed(seed)
    logits, slots = 4 * torch.randn(rows + 2, vocab), 5
    at, of = torch.randperm(rows + 2)[:rows], torch.randint(slots, (rows,))
    bits = packed(torch.rand(rows, vocab) < 0.7)
    seen = torch.randint(4, (slots, vocab), dtype=torch.int32) * (torch.rand(slots, vocab) < 0.3)
    seen += IN_PROMPT * (torch.rand(slots, vocab) < 0.2).to(torch.int32)
    penalties = torch.rand(slots, 3) * torch.tensor([1.5, 4, 4]) + torch.tensor([0.5, -2, -2])
    paths = torch.randint(-1, min(vocab, 50), (rows, depth))
    tokens = torch.stack([torch.randperm(vocab)[:7] for _ in range(slots)])
    tokens[torch.rand(tokens.shape) < 0.3] = -1
    values = torch.randn(tokens.shape)
    edits = Mask(at, bits), Bias(at, of, tokens, values), Penalties(at, of, paths, penalties, seen)
    got, want = logits.to(device), logits.clone()
    for edit in edits:
        edit.apply_(want)
    mask_(got, at.to(device), bits.to(device))
    add_bias_(got, at.to(device), of.to(device), tokens.to(device), values.to(device))
    told = at.to(device), of.to(device), paths.to(device)
    penalize_(got, *told, penalties.to(device), seen.to(device), IN_PROMPT)
    assert torch.equal(got.cpu(), want)
    assert int((want == -torch.inf).sum()) > 0


@settings(max_examples=15)
@given(st.integers(0, 2**20), st.integers(1, 5), st.sampled_from([33, 250, 2049]), st.integers(0, 4))
def test_edits_are_the_reference_s(seed: int, rows: int, vocab: int, depth: int) -> None:
    check_edits(seed, rows, vocab, depth, CPU)
