"""One round on the device: draft, verify, draw, accept, and the state of the next round; whole, or stage by stage.

Knows State, the target's engine and the arithmetic of a chain. Does not know the host's books, or when rounds are
launched: what is launched depends on the number of rows and steps and on the kind of draws alone, so that a CUDA graph
holds it.

A text has L tokens, the last of which, its root, has no KV yet. The target judges [root, d1 .. dk] as a chain at the
positions from L-1 on, so that what is accepted lies where it belongs. The outcome after each is drawn with the noise of
its position (docs/design.md, section 3), and the drafts that lead are accepted as long as they equal it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from distspec.attention import Places
from distspec.engine.engine import Engine
from distspec.engine.rolling.chains import Chains, EngineChains
from distspec.engine.rolling.ops import Spread, make_up, settle, spread
from distspec.engine.rolling.state import Kind, State
from distspec.sampling import draw


@dataclass(frozen=True, slots=True)
class Part:
    """What of a round is one launch: the `whole`; all drafts, or what the first is drawn from (`root`), and each
    `further`; what the target says to the chains (`judge`). steps: drafts of the round, 0 where they do not matter."""

    name: Literal["whole", "draft", "root", "further", "judge"]
    steps: int = 0

    @property
    def draws(self) -> bool:
        return self.name in ("whole", "draft")

    @property
    def fed(self) -> int:
        """Tokens of each row that it is given."""
        return {"further": 1, "judge": self.steps + 1}.get(self.name, 0)


class Round:
    """odds: how often the first guess is right, if outcomes and guesses are made up (distspec.synthetic): the draws are
    made and not used. Empty: they are not."""

    def __init__(self, state: State, target: Engine, chains: Chains | None, odds: Sequence[float] = ()) -> None:
        self._state = state
        self._target = target
        self._chains = chains
        self._odds = tuple(odds)

    def __call__(self, slots: Tensor, steps: int, kind: Kind) -> Tensor:
        """slots: int64 [rows]. Returns int64 [rows, steps + 2]: how many drafts were accepted, and the outcomes after
        the root and after each draft."""
        chain, rows = self.draft(slots, steps, kind), self.rows(slots, steps + 1)
        logits = self._target.model.logits(self.forward(slots, chain, rows))
        drawn = draw(logits, kind.rows(rows.reals, rows.integers, steps + 1))
        return self.settle(slots, chain, rows, drawn)

    def compute(self, part: Part, slots: Tensor, kind: Kind, fed: Tensor) -> Tensor:
        """One part of a round. fed: int64 [rows, part.fed]. Returns what the method of its name does."""
        if part.name == "whole":
            return self(slots, part.steps, kind)
        if part.name == "draft":
            return self.draft(slots, part.steps, kind)
        if part.name == "judge":
            return self.forward(slots, fed, self.rows(slots, part.steps + 1))
        assert isinstance(self._chains, EngineChains)
        if part.name == "root":
            return self._chains.root(slots, self._state.last.index_select(0, slots))
        return self._chains.further(slots, fed[:, 0])

    def draft(self, slots: Tensor, steps: int, kind: Kind) -> Tensor:
        """The chains, int64 [rows, nodes]: the last token of each text, its root, and its drafts."""
        last, drafts = self._state.last.index_select(0, slots), list[Tensor]()
        if steps:
            assert self._chains is not None
            drafts = self._chains.draft(slots, last, steps, kind)
        return torch.stack([last[:, 1], *drafts], 1)

    def rows(self, slots: Tensor, count: int) -> Spread:
        """Where the tokens of chains stand, and how the outcome after each is drawn; until `settle`."""
        state = self._state
        return spread(state.lengths, state.keys, state.reals, slots, -1, count)

    def forward(self, slots: Tensor, chain: Tensor, rows: Spread) -> Tensor:
        """What the target says to each token of the chains, [rows * nodes, hidden_size]; see Runner.hidden."""
        runner, places = self._target.runner, Places(self._state.tables, self._state.lengths, slots, -1)
        assert runner.plans is not None
        return runner.hidden(chain.flatten(), rows.positions, runner.plans.chains(places, chain.shape[1]))

    def settle(self, slots: Tensor, chain: Tensor, rows: Spread, drawn: Tensor) -> Tensor:
        """Texts go on. drawn: int64 [rows * nodes], after each token of the chains. Returns the results of the round,
        as a call does."""
        if self._odds:
            drawn = make_up(rows.integers, chain.flatten(), self._target.model.config.vocab_size)
        outcomes = drawn.view_as(chain)
        if self._chains is not None:
            self._chains.follow(slots, outcomes)
        return settle(self._state.lengths, self._state.last, slots, chain, outcomes)
