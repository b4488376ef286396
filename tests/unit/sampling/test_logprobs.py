from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distspec.protocol.values import SamplingParams
from distspec.sampling import GREEDY_BELOW, SamplingRows, draw
from distspec.sampling.logprobs import processed, tell
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
    scores = processed(logits, rows)
    assert torch.equal(logits, before)
    for row, param, token, given_ in zip(scores, params, draw(logits, rows).tolist(), logits, strict=True):
        want = _distribution(given_, param)
        # float sums may put the last token of a nucleus on either side
        assert int((row.isfinite() ^ want.isfinite()).sum()) <= 1
        assert math.isfinite(row[token])
        both = row.isfinite() & want.isfinite()
        assert torch.allclose(row[both], want[both])
