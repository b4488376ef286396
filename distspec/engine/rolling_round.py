"""One round on the device: draft, verify, draw, accept, and the state of the next round.

Knows State, two engines and the arithmetic of a chain. Does not know the host's books, or when rounds are launched:
what is launched depends on the number of rows and steps and on the kind of draws alone, so that a CUDA graph holds it.

A text has L tokens, the last of which, its root, has no KV yet. The drafter is fed the last two tokens, since the last
draft of an accepted chain never was, then its own drafts one by one; the target judges [root, d1 .. dk] as a chain at
the positions from L-1 on, so that what is accepted lies where it belongs. The outcome after each is drawn with the
noise of its position (docs/design.md, section 3), and the drafts that lead are accepted as long as they equal it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distspec.attention import DevicePlans, Places
from distspec.engine.engine import Engine
from distspec.engine.rolling_ops import Spread, make_up, settle, spread
from distspec.engine.rolling_state import Kind, State
from distspec.sampling import draw


class Round:
    """odds: how often the first guess is right, if outcomes and guesses are made up (distspec.synthetic): the draws are
    made and not used. Empty: they are not."""

    def __init__(self, state: State, target: Engine, drafter: Engine | None, odds: Sequence[float] = ()) -> None:
        self._state = state
        self._target = target
        self._drafter = drafter
        self._odds = tuple(odds)

    def __call__(self, slots: Tensor, steps: int, kind: Kind) -> Tensor:
        """slots: int64 [rows]. Returns int64 [rows, steps + 2]: how many drafts were accepted, and the outcomes after
        the root and after each draft."""
        last = self._state.last.index_select(0, slots)
        drafts = self._draft(slots, last, steps, kind) if steps else []
        chain = torch.stack([last[:, 1], *drafts], 1)
        outcomes = self._judge(slots, chain, kind)
        return settle(self._state.lengths, self._state.last, slots, chain, outcomes)

    def _draft(self, slots: Tensor, last: Tensor, steps: int, kind: Kind) -> list[Tensor]:
        """last: int64 [rows, 2]. The drafts of each row, int64 [rows] for each step."""
        drafter, tables, count = self._drafter, self._state.draft_tables, len(slots)
        assert drafter is not None
        fed, rows = last.flatten(), self._spread(slots, -2, 2)
        logits = drafter.forward(fed, rows.positions, _plans(drafter).chains(self._places(tables, slots, -2), 2), 2)
        drafts = [self._guess(logits, fed[1::2], rows.part(0, 2 * count, 2), kind)]
        if steps == 1:
            return drafts
        rows, plans = self._spread(slots, 0, steps - 1, stepwise=True), self._places(tables, slots, 0)
        for step, plan in enumerate(_plans(drafter).steps(plans, steps - 1)):
            own = rows.part(step * count, (step + 1) * count)
            logits = drafter.forward(drafts[-1], own.positions, plan)
            drafts.append(self._guess(logits, drafts[-1], own, kind))
        return drafts

    def _guess(self, logits: Tensor, fed: Tensor, rows: Spread, kind: Kind) -> Tensor:
        drawn = draw(logits, kind.rows(rows.reals, rows.integers, 1))
        return make_up(rows.integers, fed, logits.shape[1], self._odds[0]) if self._odds else drawn

    def _judge(self, slots: Tensor, chain: Tensor, kind: Kind) -> Tensor:
        """The outcomes after each token of the chains, int64 [rows, nodes]."""
        count, fed = chain.shape[1], chain.flatten()
        rows = self._spread(slots, -1, count)
        plan = _plans(self._target).chains(self._places(self._state.tables, slots, -1), count)
        logits = self._target.forward(fed, rows.positions, plan)
        drawn = draw(logits, kind.rows(rows.reals, rows.integers, count))
        return (make_up(rows.integers, fed, logits.shape[1]) if self._odds else drawn).view_as(chain)

    def _places(self, tables: Tensor, slots: Tensor, offset: int) -> Places:
        return Places(tables, self._state.lengths, slots, offset)

    def _spread(self, slots: Tensor, offset: int, count: int, stepwise: bool = False) -> Spread:
        state = self._state
        return spread(state.lengths, state.keys, state.reals, slots, offset, count, stepwise=stepwise)


def _plans(engine: Engine) -> DevicePlans:
    plans = engine.plans
    assert plans is not None
    return plans
