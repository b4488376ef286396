"""What truncation lets stay, against sampling.process; tests/gpu runs the same check compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.kernels.truncate import DEEPEST, Limits, kept
from distspec.protocol.values import SamplingParams
from distspec.sampling import GREEDY_BELOW, SamplingRows, process
from tests.unit.kernels.test_elementwise import CPU

pytestmark = pytest.mark.needs("interpreter")


_UNRESOLVED = 2e-6
"""Share of the mass that float32 sums over a large vocabulary may misplace."""


def limited(rows: int) -> list[SamplingParams]:
    """Every mix of limits, from those that leave one token to those that leave nearly all."""
    return [
        SamplingParams(
            max_tokens=1,
            seed=row,
            temperature=(0.7, 1.0, 2.0)[row % 3],
            top_k=(0, 1, 5, 70)[row % 4],
            top_p=(1.0, 0.01, 0.5, 0.95, 0.9999)[row % 5],
            min_p=(0.0, 0.02)[row // 7 % 2],
        )
        for row in range(rows)
    ]


def check_kept(rows: int, vocab: int, spread: float, device: torch.device) -> None:
    """A token more or less only where it lies at the edge, since equals are told apart late; or at the edge of a
    nucleus, since sums are in float32: then what came before the last of them, and was not enough or too much, weighs
    next to nothing. Where the last tokens of a vocabulary weigh so little each, there may be many."""
    logits = spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[::3] = logits[::3].round()  # many equals
    there, here = (SamplingRows.of(limited(rows), range(rows), where) for where in (device, CPU))
    limits = Limits(there.top_k, there.top_p, there.min_p, bool(there.max_top_k), there.any_top_p)
    found = kept(logits.to(device), there.temperature, limits, GREEDY_BELOW)
    depth = found.top.cpu()[:, None] - logits / here.temperature[:, None]
    ours, book = depth <= found.depth.cpu()[:, None], process(logits, here).isfinite()
    wrong = (ours ^ book) & (depth < DEEPEST)
    edge = depth.masked_fill(~book, -1.0).amax(dim=-1, keepdim=True)
    odd = wrong & ((depth - edge).abs() > 1e-4)
    assert bool(ours.gather(1, logits.argmax(dim=-1, keepdim=True)).all())
    weights = torch.where(odd, (-depth).double().softmax(dim=-1), 0.0)
    last = weights.masked_fill(~odd, 1.0).amin(dim=-1)
    assert float((weights.sum(dim=-1) - last).max()) < _UNRESOLVED
    assert not bool((odd.any(dim=-1) & (here.top_p == 1)).any())


@settings(max_examples=4)
@given(st.sampled_from([3, 250]), st.sampled_from([0.3, 3.0, 30.0]))
def test_what_stays(vocab: int, spread: float) -> None:
    check_kept(10, vocab, spread, CPU)


def test_what_stays_of_several_blocks() -> None:
    check_kept(3, 2500, 3.0, CPU)
