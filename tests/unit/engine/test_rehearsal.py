"""What is rehearsed is as large as a step may be, in a pool as small as is said, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from distspec import config
from distspec.engine import Engine
from distspec.engine.acceptance import ACCEPTANCES
from distspec.engine.rehearsal import rehearse
from distspec.engine.sizing import few
from distspec.models.base import Taps
from tests.desks import CPU, model


class Watched:
    """A model that notes how many rows it computes, and how many logits at once."""

    def __init__(self) -> None:
        self.config, self.dtype = model().config, model().dtype
        self.rows: list[int] = []
        self.wanted: list[int] = []

    def forward(self, tokens: Tensor, positions: Tensor, attend: Any, taps: Taps | None = None) -> Tensor:
        self.rows.append(len(tokens))
        return model().forward(tokens, positions, attend, taps)

    def logits(self, hidden: Tensor) -> Tensor:
        self.wanted.append(len(hidden))
        return model().logits(hidden)


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize(("seqs", "scratch", "budget"), [(8, 16, 64), (1, 16, 100), (40, 4, 64), (3, 64, 150)])
def test_the_largest_steps(acceptance: str, seqs: int, scratch: int, budget: int) -> None:
    options = config.Engine(max_num_seqs=seqs, max_scratch_nodes=scratch, max_num_batched_tokens=budget)
    options = structs.replace(options, num_pages=few(options))
    watched = Watched()
    engine = Engine(watched, options, device=CPU, acceptance=ACCEPTANCES[acceptance])
    with torch.inference_mode():
        rehearse(engine, options)
    assert budget in watched.rows
    assert max(watched.wanted) >= min(budget, seqs * (1 + scratch))
    engine.check()
    assert engine.books.allocator.free == options.num_pages
