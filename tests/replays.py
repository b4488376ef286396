"""Graphs on a device that has none: what was captured is computed once more where it would be replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from distspec.engine.capture import Captured
from distspec.models.base import Taps
from distspec.models.llama import Llama

T = TypeVar("T")


class Replays:
    """See engine.capture.Capture. count, replays: how many were captured and replayed. is_capturing: now."""

    def __init__(self) -> None:
        self.count = self.replays = 0
        self.is_capturing = False

    def __call__(self, compute: Callable[[], T]) -> Captured[T]:
        self.is_capturing = True
        try:
            result = compute()
        finally:
            self.is_capturing = False
        self.count += 1

        def replay() -> None:
            self.replays += 1
            found = compute()
            if isinstance(result, Tensor):
                assert isinstance(found, Tensor)
                result.copy_(found)

        return Captured(replay, result)


class Short:
    """A model for which there is memory for so many rows, where a graph is captured."""

    def __init__(self, model: Llama, replays: Replays, rows: int) -> None:
        self.config, self.dtype, self.logits = model.config, model.dtype, model.logits
        self._model = model
        self._replays = replays
        self._rows = rows

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any, taps: Taps | None = None) -> Tensor:
        if self._replays.is_capturing and len(tokens) > self._rows:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self._model.forward(tokens, positions, attend, taps)
