"""What is told of tokens, against the logits that it is told of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from distspec.protocol.values import SamplingParams, TokenLogprobs
from distspec.sampling import GREEDY_BELOW, SamplingRows, process
from tests.chain import edited

NEAR = 1e-4


def processed(scores: Tensor, text: Sequence[int], params: SamplingParams) -> Tensor:
    scores = edited(scores, text, params)
    if params.temperature < GREEDY_BELOW:
        return scores
    return process(scores[None], SamplingRows.of([params], [len(text)], scores.device))[0]


def check(said: TokenLogprobs, scores: Tensor, token: int, most: int) -> None:
    right = scores.log_softmax(-1)
    assert abs(said.logprob - float(right[token])) < NEAR
    wide = right.topk(min(most, int(right.isfinite().sum()))).values.tolist()
    assert [logprob for _, logprob in said.top] == pytest.approx(wide, abs=NEAR)
    for other, logprob in said.top:  # the same tokens, but for those that are as likely
        assert abs(logprob - float(right[other])) < NEAR
    assert len({other for other, _ in said.top}) == len(said.top)
    within = (int((right > right[token] + NEAR).sum()), int((right >= right[token] - NEAR).sum()))
    assert within[0] < said.rank <= within[1]
