"""What rounds know of their slots, on the device: nothing of it goes through the host between two rounds.

Knows lengths, last tokens, sampling parameters and page tables, by slot. Does not know models, or what a round does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distspec.copies import integers, to_device
from distspec.engine.engine import Engine
from distspec.protocol.values import SamplingParams
from distspec.sampling import GREEDY_BELOW, SamplingRows
from distspec.sampling.noise import signed


@dataclass(frozen=True, slots=True)
class Kind:
    """What the host knows of how the tokens of some rows are drawn, as SamplingRows has it: by this it decides what is
    launched. sampled: which of the rows are not greedy."""

    sampled: tuple[int, ...]
    max_top_k: int
    any_top_p: bool
    any_min_p: bool
    least_top_p: float = 0.0

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Kind:
        sampled = tuple(row for row, p in enumerate(params) if p.temperature >= GREEDY_BELOW)
        some = [params[row] for row in sampled]
        return cls(
            sampled,
            max((p.top_k for p in some), default=0),
            any(p.top_p < 1 for p in some),
            any(p.min_p > 0 for p in some),
            min((p.top_p for p in some), default=1.0),
        )

    @property
    def truncates(self) -> bool:
        return bool(self.max_top_k) or self.any_top_p or self.any_min_p

    def rows(self, reals: Tensor, integers: Tensor, count: int) -> SamplingRows:
        """For `count` rows in the place of each. reals, integers: see SamplingRows."""
        sampled = tuple(row * count + i for row in self.sampled for i in range(count))
        limits = (self.max_top_k, self.any_top_p, self.any_min_p, self.least_top_p)
        return SamplingRows(reals, integers, sampled, *limits)


class State:
    """By slot of the target; one row more than there are slots is nobody's, for rows that only pad.

    lengths: int64 [slots + 1], tokens of the text, the last one included, whose KV is still to be computed.
    last: int64 [slots + 1, 2], the last two tokens of the text; before the first stands 0.
    reals: float32 [slots + 1, 3], temperature, top_p, min_p; keys: int64 [slots + 1, 3], top_k, seed, choice.
    tables, draft_tables: int64 [slots + 1, pages], of the target's sequences and the drafter's.
    """

    def __init__(self, target: Engine, drafter: Engine | None) -> None:
        rows, device = target.slots + 1, target.device
        self.device = device
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.last = torch.zeros(rows, 2, dtype=torch.int64, device=device)
        self.reals = torch.tensor([0.0, 1.0, 0.0], device=device).repeat(rows, 1)
        self.keys = torch.zeros(rows, 3, dtype=torch.int64, device=device)
        self.tables = _table(rows, target)
        self.draft_tables = _table(rows, drafter or target)

    def enter(self, slot: int, length: int, last: tuple[int, int], params: SamplingParams) -> None:
        numbers = self.upload([length, *last, params.top_k, signed(params.seed), params.choice])
        self.lengths[slot], self.last[slot], self.keys[slot] = numbers[0], numbers[1:3], numbers[3:]
        reals = torch.tensor([params.temperature, params.top_p, params.min_p], dtype=torch.float32)
        self.reals[slot] = to_device(reals, self.device)

    def upload(self, values: Sequence[int]) -> Tensor:
        """int64 [n], without waiting for the device."""
        return integers(values, self.device)

    def pages(self, table: Tensor, changes: Sequence[tuple[int, int, int]]) -> None:
        """Write to `tables` or `draft_tables`: (slot, index, page) each."""
        if changes:
            rows, columns, pages = self.upload([value for change in changes for value in change]).view(-1, 3).unbind(1)
            table.view(-1).index_copy_(0, rows * table.shape[1] + columns, pages)


def _table(rows: int, engine: Engine) -> Tensor:
    pages = -(-engine.max_model_len // engine.page_size) + 1
    return torch.zeros(rows, pages, dtype=torch.int64, device=engine.device)
