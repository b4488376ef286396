"""One round on the device: draft, verify, draw, accept, and the state of the next round.

Knows State, two engines and the arithmetic of a chain. Does not know the host's books, or when rounds are launched:
the shapes of all it computes depend on the number of rows and steps alone, so that a CUDA graph can hold it.

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
from distspec.engine.rolling_state import Kind, State
from distspec.sampling import SamplingRows, draw


class Round:
    """odds: how often the first guess is right, if outcomes and guesses are made up (distspec.synthetic)."""

    def __init__(self, state: State, target: Engine, drafter: Engine | None, odds: Sequence[float] = ()) -> None:
        self._state = state
        self._target = target
        self._drafter = drafter
        self._odds = tuple(odds)

    def __call__(self, slots: Tensor, steps: int, kind: Kind) -> Tensor:
        """slots: int64 [rows]. Returns int64 [rows, steps + 2]: how many drafts were accepted, and the outcomes after
        the root and after each draft."""
        state = self._state
        lengths, root = state.lengths.index_select(0, slots), state.last.index_select(0, slots)[:, 1]
        drafts = self._draft(slots, lengths, steps, kind) if steps else []
        chain = torch.stack([root, *drafts], 1)
        outcomes = self._judge(slots, lengths, chain, kind)
        accepted = (chain[:, 1:] == outcomes[:, :-1]).to(torch.int64).cumprod(1).sum(1)
        last = outcomes.gather(1, accepted[:, None])
        before = chain.gather(1, accepted[:, None])
        state.lengths.index_copy_(0, slots, lengths + accepted + 1)
        state.last.index_copy_(0, slots, torch.cat((before, last), 1))
        return torch.cat((accepted[:, None], outcomes), 1)

    def _draft(self, slots: Tensor, lengths: Tensor, steps: int, kind: Kind) -> list[Tensor]:
        """The drafts of each row, int64 [rows] for each step."""
        state, drafter = self._state, self._drafter
        assert drafter is not None
        plans = _plans(drafter)
        tokens = state.last.index_select(0, slots).flatten()
        positions = (lengths[:, None] + torch.arange(-2, 0, device=state.device)).clamp(min=0).flatten()
        first = plans.chains(Places(state.draft_tables, slots, lengths - 2), 2)
        logits = drafter.forward(tokens, positions, first, every=2)
        drafts = [draw(logits, self._sampling(slots, lengths, 1, kind))]
        for step, plan in enumerate(plans.steps(Places(state.draft_tables, slots, lengths), steps - 1)):
            logits = drafter.forward(drafts[-1], lengths + step, plan)
            drafts.append(draw(logits, self._sampling(slots, lengths + step + 1, 1, kind)))
        return drafts

    def _judge(self, slots: Tensor, lengths: Tensor, chain: Tensor, kind: Kind) -> Tensor:
        """The outcomes after each token of the chains, int64 [rows, nodes]."""
        state, count = self._state, chain.shape[1]
        positions = lengths[:, None] + torch.arange(-1, count - 1, device=state.device)
        plan = _plans(self._target).chains(Places(state.tables, slots, lengths - 1), count)
        logits = self._target.forward(chain.flatten(), positions.flatten(), plan)
        return draw(logits, self._sampling(slots, lengths, count, kind)).view(-1, count)

    def _sampling(self, slots: Tensor, first: Tensor, count: int, kind: Kind) -> SamplingRows:
        """For `count` tokens of each row, from the position `first` on."""
        own = slots.repeat_interleave(count)
        at = (first[:, None] + torch.arange(count, device=first.device)).view(-1, 1)
        return kind.rows(
            self._state.reals.index_select(0, own), torch.cat((self._state.keys.index_select(0, own), at), 1), count
        )


def _plans(engine: Engine) -> DevicePlans:
    plans = engine.plans
    assert plans is not None
    return plans
