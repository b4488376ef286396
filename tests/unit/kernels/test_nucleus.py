"""The draw from a nucleus against sampling.draw; tests/gpu runs the same check compiled."""

from __future__ import annotations

import pytest
import torch

from distspec.kernels.nucleus import draw_nucleus, suits
from distspec.protocol.values import SamplingParams
from distspec.sampling import GREEDY_BELOW, SamplingRows, draw
from distspec.sampling.draw import _perturbed
from tests.unit.kernels.test_elementwise import CPU

pytestmark = pytest.mark.needs("interpreter")


def check_nucleus(seed: int, rows: int, vocab: int, spread: float, device: torch.device) -> None:
    """Rows with and without each limit, greedy ones too. Another token only where its score all but ties, or where it
    lies at the very edge of the nucleus."""
    params = [
        SamplingParams(
            max_tokens=1,
            seed=seed + row,
            temperature=(0.7, 1.0, 2.0, 0.0)[row % 4],
            top_p=(0.8, 0.95, 1.0)[row % 3],
            min_p=(0.0, 0.05)[row // 4 % 2],
        )
        for row in range(rows)
    ]
    logits = spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    logits[::3] = logits[::3].round()  # many equals
    logits[:, ::5] = -torch.inf  # as masks leave it
    there, here = (SamplingRows.of(params, range(rows), where) for where in (device, CPU))
    keys = there.integers[:, 1:]
    got = draw_nucleus(logits.to(device), there.temperature, keys, there.top_p, there.min_p, GREEDY_BELOW).cpu()
    scores = _perturbed(logits, here)
    lost = scores.amax(dim=-1) - scores.gather(1, got[:, None])[:, 0]
    assert int((lost > 1e-5).sum()) <= rows // 100
    assert int((got != draw(logits, here)).sum()) <= rows // 50


@pytest.mark.parametrize(("vocab", "spread"), [(5, 1.0), (300, 0.0), (300, 6.0), (2100, 1.0)])
def test_the_draw_is_the_reference_s(vocab: int, spread: float) -> None:
    check_nucleus(vocab, 12, vocab, spread, CPU)


def test_where_candidates_may_all_lie_outside_it_is_not_used() -> None:
    assert suits(0.9)
    assert not suits(0.3)
