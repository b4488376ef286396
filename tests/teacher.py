"""The plain target: one dense sequence, one token at a time; and how close a token was to the one it drew.

No pages, no batch, no cache but this sequence's own keys and values. Logits are edited by tests/chain.py, then drawn
from by the package's `draw`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from distspec.models.llama import Llama
from distspec.protocol.values import SamplingParams, finish_reason
from distspec.sampling import GREEDY_BELOW, SamplingRows, draw, gumbel, process
from tests.causal import Causal, logits
from tests.chain import edited

MARGIN = 1e-3
"""Perturbed scores this close may fall either way by float noise: the bound of the design."""


@torch.inference_mode()
def plain(model: Llama, prompt: Sequence[int], params: SamplingParams) -> tuple[list[int], str]:
    """The output that everything must equal, and why it ends."""
    attend, tokens = Causal(), list(prompt)
    params = replace(params, prompt_tokens=len(prompt))
    fresh, reason = tokens, None
    while reason is None:
        positions = torch.arange(len(tokens) - len(fresh), len(tokens))
        hidden = model.forward(torch.tensor(fresh), positions, attend)[-1:]
        rows = SamplingRows.of([params], [len(tokens)], hidden.device)
        fresh = [int(draw(edited(model.logits(hidden)[0], tokens, params)[None], rows))]
        tokens = tokens + fresh
        reason = finish_reason(params, len(tokens) - len(prompt), fresh[0])
    return tokens[len(prompt) :], reason


def excused(model: Llama, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams) -> int:
    """Output tokens that are not the best after their own prefix, teacher-forced, but within MARGIN of it.

    Raises AssertionError for one that is further away.
    """
    best, chosen = _scores(model, [*prompt, *tokens], len(prompt), params)
    margins = best - chosen
    assert float(margins.max()) < MARGIN, f"margins {margins.tolist()}"
    return int((margins > 0).sum())


@torch.inference_mode()
def _scores(model: Llama, text: list[int], start: int, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """float32 [len(text) - start] twice: the best perturbed score at each position, and that of the text's token."""
    params = replace(params, prompt_tokens=start)
    scores = logits(model, text[:-1])[start - 1 :]
    scores = torch.stack([edited(row, text[:end], params) for end, row in enumerate(scores, start)])
    if params.temperature >= GREEDY_BELOW:
        rows = SamplingRows.of([params] * len(scores), range(start, len(text)), scores.device)
        scores = process(scores, rows) + gumbel(rows.seed, rows.choice, rows.position, scores.shape[1])
    return scores.amax(dim=-1), scores.gather(1, torch.tensor(text[start:])[:, None])[:, 0]
