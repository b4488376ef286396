"""The processor chain by the book: one row, one token after the other, in plain Python over the whole text.

Shares no code with the package's own; only float32 is the same, since sums and products must round alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from distspec.protocol.values import SamplingParams

_EDITS = (
    *("allowed_token_ids", "bad_words", "min_tokens", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def edited(logits: Tensor, text: Sequence[int], params: SamplingParams) -> Tensor:
    """float32 [vocab] of the token that follows `text`, prompt included, before temperature."""
    if all(getattr(params, name) == getattr(SamplingParams(max_tokens=1), name) for name in _EDITS):
        return logits
    output = list(text[params.prompt_tokens :])
    scores = list(logits.clone())
    forbidden = _forbidden(len(scores), output, params)
    for token in range(len(scores)):
        if token in forbidden:
            scores[token] = torch.tensor(-math.inf)
        for biased, value in params.logit_bias:
            if biased == token:
                scores[token] = scores[token] + torch.tensor(value)
        if params.repetition_penalty != 1 and token in text:
            factor = torch.tensor(params.repetition_penalty)
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        if token in output:
            scores[token] = scores[token] - torch.tensor(params.frequency_penalty) * output.count(token)
            scores[token] = scores[token] - torch.tensor(params.presence_penalty)
    return torch.stack(scores)


def _forbidden(vocab: int, output: list[int], params: SamplingParams) -> set[int]:
    """Bans that would leave nothing of what is allowed are not followed."""
    every = set(range(vocab))
    allowed = set(params.allowed_token_ids) or every
    banned = set()
    for *before, last in params.bad_words:
        if output[len(output) - len(before) :] == before and len(output) >= len(before):
            banned.add(last)
    if len(output) < params.min_tokens:
        banned |= set(params.stop_token_ids)
    return every - (allowed - banned or allowed)
