from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from distspec.sampling.edits import Bans, Mask, packed, unpacked


@given(st.integers(1, 100), st.integers(0, 2**32))
def test_a_mask_holds_each_token_in_its_own_bit(vocab: int, seed: int) -> None:
    stays = torch.rand(3, vocab, generator=torch.Generator().manual_seed(seed)) < 0.5
    bits = packed(stays)
    assert bits.dtype == torch.int32
    assert bits.shape == (3, -(-vocab // 32))
    for row in range(3):
        for token in range(vocab):
            assert bool(int(bits[row, token // 32]) >> token % 32 & 1) == bool(stays[row, token])
    assert torch.equal(unpacked(bits, vocab), stays)


def test_masks_and_bans_change_the_rows_they_name_and_no_others() -> None:
    logits = torch.randn(4, 70)
    before, stays = logits.clone(), torch.rand(2, 70) < 0.5
    Mask(torch.tensor([3, 1]), packed(stays)).apply_(logits)
    Bans(torch.tensor([0, 0]), torch.tensor([69, 3])).apply_(logits)
    want = before.clone()
    want[3, ~stays[0]] = want[1, ~stays[1]] = want[0, [3, 69]] = -torch.inf
    assert torch.equal(logits, want)
