"""What drafts chains inside a round, and the one that every model can be: an engine that feeds itself.

Knows State and how a drafter's engine goes on from it. Does not know the target, or which drafts were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from distspec.attention import DevicePlans, Places
from distspec.engine.engine import Engine
from distspec.engine.rolling.ops import Spread, make_up, spread
from distspec.engine.rolling.state import Kind, State
from distspec.sampling import draw


class Chains(Protocol):
    """Drafts for texts whose lengths only State knows. A CUDA graph holds it: it waits for nothing, and what it
    launches depends on the number of rows and steps and on the kind of draws alone."""

    def enter(self, slot: int, tokens: Sequence[int]) -> None:
        """The whole text of a slot, its last token included."""
        ...

    def draft(self, slots: Tensor, last: Tensor, steps: int, kind: Kind) -> list[Tensor]:
        """slots: int64 [rows]; last: int64 [rows, 2], the last two tokens. The drafts, int64 [rows] for each step."""
        ...

    def follow(self, slots: Tensor, outcomes: Tensor) -> None:
        """Before lengths move on: int64 [rows, steps + 1], which follow the text as far as drafts are accepted."""
        ...


class EngineChains:
    """See Chains. A drafter is fed the last two tokens, since the last draft of an accepted chain never was, then its
    own drafts one by one. odds: see Round."""

    def __init__(self, state: State, engine: Engine, odds: Sequence[float] = ()) -> None:
        assert engine.runner.plans is not None
        self._state = state
        self._engine = engine
        self._plans: DevicePlans = engine.runner.plans
        self._odds = tuple(odds)
        self._ahead = torch.zeros_like(state.lengths)

    def enter(self, slot: int, tokens: Sequence[int]) -> None:
        """The engine's own sequence holds it."""

    def draft(self, slots: Tensor, last: Tensor, steps: int, kind: Kind) -> list[Tensor]:
        count, rows = len(slots), self._spread(slots, -2, 2)
        logits = self._engine.model.logits(self._root(slots, last, rows))
        drafts = [self._guess(logits, last[:, 1], rows.part(0, 2 * count, 2), kind)]
        if steps == 1:
            return drafts
        rows = self._spread(slots, 0, steps - 1, stepwise=True)
        for step, plan in enumerate(self._plans.steps(self._places(slots, 0), steps - 1)):
            own = rows.part(step * count, (step + 1) * count)
            logits = self._engine.model.logits(self._engine.runner.hidden(drafts[-1], own.positions, plan))
            drafts.append(self._guess(logits, drafts[-1], own, kind))
        return drafts

    def follow(self, slots: Tensor, outcomes: Tensor) -> None:
        """It sees in the next text what became of its drafts."""

    # -- step by step ------------------------------------------------------------------------------

    def root(self, slots: Tensor, last: Tensor) -> Tensor:
        """What the first drafts are drawn from, see Runner.hidden: [rows, hidden_size]."""
        return self._root(slots, last, self._spread(slots, -2, 2))

    def further(self, slots: Tensor, tokens: Tensor) -> Tensor:
        """One token further, int64 [rows], to where `move` said. As `root`."""
        rows = spread(self._ahead, self._state.keys, self._state.reals, slots, 0, 1)
        plan = self._plans.chains(Places(self._state.draft_tables, self._ahead, slots, 0), 1)
        return self._engine.runner.hidden(tokens, rows.positions, plan)

    def move(self, drafts: int) -> None:
        """So many drafts lie below each text now, the last of which is computed next."""
        torch.add(self._state.lengths, drafts - 1, out=self._ahead)

    def guess(self, logits: Tensor, last: Tensor, slots: Tensor, drafts: int, kind: Kind) -> Tensor:
        """The next draft of each, int64 [rows], after `last`, below which so many lie already."""
        return self._guess(logits, last, self._spread(slots, drafts - 1, 1), kind)

    # -- helpers -----------------------------------------------------------------------------------

    def _root(self, slots: Tensor, last: Tensor, rows: Spread) -> Tensor:
        plan = self._plans.chains(self._places(slots, -2), 2)
        return self._engine.runner.hidden(last.flatten(), rows.positions, plan)[1::2].contiguous()

    def _guess(self, logits: Tensor, fed: Tensor, rows: Spread, kind: Kind) -> Tensor:
        drawn = draw(logits, kind.rows(rows.reals, rows.integers, 1))
        return make_up(rows.integers, fed, logits.shape[1], self._odds[0]) if self._odds else drawn

    def _places(self, slots: Tensor, offset: int) -> Places:
        return Places(self._state.draft_tables, self._state.lengths, slots, offset)

    def _spread(self, slots: Tensor, offset: int, count: int, stepwise: bool = False) -> Spread:
        state = self._state
        return spread(state.lengths, state.keys, state.reals, slots, offset, count, stepwise=stepwise)
