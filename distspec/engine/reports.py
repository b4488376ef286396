"""Logprobs of a step: of the tokens that it draws, and of given ones, as a prompt's, for the slots that ask.

Knows the rows of a batch and their logits. Does not know models, or what is done with what is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from distspec.copies import integers
from distspec.engine.batch import Batch, Outcome, Segment
from distspec.protocol.values import TokenLogprobs
from distspec.sampling import SamplingRows
from distspec.sampling.logprobs import Telling, Told, tell

Mode = Literal["raw_logprobs", "processed_logprobs"]

_CHUNK = 256
"""Given tokens of which logits are in memory at once."""


class Reports:
    """Of one step. Everything is asked of the device beside the draw, and waited for in the end alone."""

    def __init__(self, mode: Mode, device: torch.device) -> None:
        self._is_raw = mode == "raw_logprobs"
        self._device = device
        self._telling: Telling | None = None
        self._drawn: Told | None = None
        self._given: list[tuple[Told, Sequence[int]]] = []

    def give(self, batch: Batch, logits_of: Callable[[Sequence[int]], Tensor]) -> None:
        """Tell of given tokens, in either mode by the model's own distribution, since nobody drew them. logits_of:
        float32 [rows, vocab] of some rows of the batch."""
        for start in range(0, len(batch.given), _CHUNK):
            rows, tokens, most = zip(*batch.given[start : start + _CHUNK], strict=True)
            told = tell(logits_of(rows), integers(tokens, self._device), max(most))
            self._given.append((told.to_host(), most))

    def before(self, batch: Batch, logits: Tensor) -> None:
        """Logits of the wanted rows, before anything changes them: float32 [rows, vocab]."""
        self._telling = Telling(batch.params, self._is_raw, self._device)
        self._telling.before(logits)

    def after(self, logits: Tensor, rows: SamplingRows, tokens: Tensor) -> None:
        """What the wanted rows were drawn from, how, and what was drawn: int64 [rows]."""
        assert self._telling is not None
        told = self._telling.after(logits, rows, tokens)
        self._drawn = told.to_host() if told is not None else None

    def deal(self, segments: Sequence[Segment], outcomes: Sequence[Outcome[int]]) -> None:
        """Put what is told beside the outcomes of the segments; waits for the device."""
        if self._drawn is None and not self._given:
            return
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        drawn: dict[int, TokenLogprobs] = {}
        if self._telling is not None and self._drawn is not None:
            drawn = self._telling.read(self._drawn, range(sum(segment.wanted for segment in segments)))
        given, row = iter([said for part, most in self._given for said in part.read(most)]), 0
        for segment, outcome in zip(segments, outcomes, strict=True):
            end = row + segment.wanted
            outcome.logprobs = [drawn[i] for i in range(row, end) if i in drawn]
            outcome.given = list(islice(given, len(segment.given)))
            row = end
