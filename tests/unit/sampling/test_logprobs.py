from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distspec.protocol.values import SamplingParams
from distspec.sampling import GREEDY_BELOW, SamplingRows, draw
from distspec.sampling.logprobs import _processed_fused, processed, tell
from tests.unit.kernels.test_truncate import limited
from tests.unit.sampling.test_draw import CPU, parameters, random_logits, reference

VOCAB = 300


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_told_is_the_log_softmax(data: st.DataObject) -> None:
    most = data.draw(st.lists(st.integers(0, 2 * VOCAB), min_size=1, max_size=4))
    scores = random_logits(len(most), VOCAB, data.draw(st.integers(0, 2**20)))
    scores[:, data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=VOCAB - 1, unique=True))] = -torch.inf
    tokens = torch.stack([row.isfinite().nonzero()[0, 0] for row in scores])
    told = tell(scores, tokens, max(most)).to_host().read(most)
    for row, token, count, said in zip(scores, tokens.tolist(), most, told, strict=True):
        right = row.double().log_softmax(-1)
        assert said.logprob == pytest.approx(float(right[token]), abs=1e-5)
        assert said.rank == 1 + int((row > row[token]).sum())
        assert len(said.top) == min(count, int(row.isfinite().sum()))
        assert [logprob for _, logprob in said.top] == pytest.approx(
            right.topk(len(said.top)).values.tolist(), abs=1e-5
        )
        for other, logprob in said.top:
            assert logprob == pytest.approx(float(right[other]), abs=1e-5)


def _distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    return logits if params.temperature < GREEDY_BELOW else reference(logits, params)


@settings(max_examples=100, deadline=None)
@given(st.lists(parameters, min_size=1, max_size=5), st.integers(0, 2**20))
def test_the_processed_distribution_is_what_is_drawn_from(params: list[SamplingParams], seed: int) -> None:
    """Greedy and sampled rows side by side; the logits themselves stay as they are."""
    logits = random_logits(len(params), VOCAB, seed)
    before, rows = logits.clone(), SamplingRows.of(params, range(len(params)), CPU)
    drawn = draw(logits, rows)
    scores = processed(logits, rows, drawn)
    assert torch.equal(logits, before)
    for row, param, token, given_ in zip(scores, params, drawn.tolist(), logits, strict=True):
        want = _distribution(given_, param)
        # float sums may put the last token of a nucleus on either side
        assert int((row.isfinite() ^ want.isfinite()).sum()) <= 1
        assert math.isfinite(row[token])
        both = row.isfinite() & want.isfinite()
        assert torch.allclose(row[both], want[both])


def check_fused(rows: int, vocab: int, device: torch.device) -> None:
    """As the reference, but for tokens at the edge of what stays; and what was drawn can always be."""
    params = [*limited(rows - 1), SamplingParams(max_tokens=1, temperature=0.0, top_k=2)]
    logits = random_logits(rows, vocab, seed=rows)
    there, here = (SamplingRows.of(params, range(rows), where) for where in (device, CPU))
    drawn = torch.stack([row.sort().indices[-1 - i % 3] for i, row in enumerate(logits)])
    found = _processed_fused(logits.to(device), there, drawn.to(device)).cpu()
    right = processed(logits, here, drawn)
    both = found.isfinite() & right.isfinite()
    assert torch.allclose(found[both], right[both])
    assert int((found.isfinite() ^ right.isfinite()).sum(dim=-1).max()) <= 3  # the drawn one, and one at the edge
    assert bool(found.gather(1, drawn[:, None]).isfinite().all())
    assert bool(found[-1].isfinite().all())


@pytest.mark.needs("interpreter")
def test_the_kernels_tell_the_same() -> None:
    check_fused(13, 200, CPU)
