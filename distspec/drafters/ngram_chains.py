"""Prompt lookup inside a round that no host looks at: texts by slot, on the device.

Knows tokens by slot and the lengths of State. Does not know requests, trees, or what was accepted before it is told.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distspec.config import Ngram
from distspec.drafters.matchers import lookup
from distspec.engine.rolling import Kind, State

_MOST_STEPS = 64


class NgramChains:
    """See Chains. Drafts what followed the latest earlier occurrence of a text's end, as NgramDrafter does; where there
    was none, anything: a round drafts as many tokens of each row."""

    def __init__(self, options: Ngram, state: State, max_model_len: int) -> None:
        self._options = options
        self._state = state
        self._width = max_model_len + _MOST_STEPS + 1  # outcomes of a last round that nobody will read
        rows = len(state.lengths)
        self._texts = torch.zeros(rows, self._width, dtype=torch.int32, device=state.device)

    def enter(self, slot: int, tokens: Sequence[int]) -> None:
        self._texts[slot, : len(tokens)].copy_(self._state.upload(tokens), non_blocking=True)

    def draft(self, slots: Tensor, last: Tensor, steps: int, kind: Kind) -> list[Tensor]:
        texts, lengths = self._texts.index_select(0, slots), self._state.lengths.index_select(0, slots)
        sizes = self._options
        runs, _ = lookup(texts, lengths, max_n=sizes.max_n, min_n=sizes.min_n, topk=1, count=steps)
        return list(runs[:, 0].to(torch.int64).unbind(1))

    def follow(self, slots: Tensor, outcomes: Tensor) -> None:
        first = slots * self._width + self._state.lengths.index_select(0, slots)
        at = first[:, None] + torch.arange(outcomes.shape[1], device=outcomes.device)
        self._texts.view(-1).index_copy_(0, at.flatten(), outcomes.flatten().to(torch.int32))
