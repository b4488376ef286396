"""Drafts that keep to what requests ask for.

Knows engines, the texts of their slots, and grammars. Does not know how anything is computed, or what is edited.

Where an engine drafts, its logits are edited step by step, and as in the round itself the host hides behind the
forward: that of a step is launched before the draft it goes on from has come to the host, which then works out the
edits of the next one. Where drafts have no logits, as of prompt lookup, the grammar cuts them and says what it forces:
the device waits for that, and gains more, since what is forced is always right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distspec.engine.engine import Engine
from distspec.engine.rolling.chains import EngineChains
from distspec.engine.rolling.copies import Copies
from distspec.engine.rolling.flight import Begun, Drafted, Row
from distspec.errors import BadConstraint
from distspec.kv.sequence import Sequence
from distspec.sampling import Asked


@dataclass(slots=True)
class _Path:
    """What follows the books of a row's text: row: in the round; slot, text: of the drafter's engine."""

    row: int
    slot: int
    text: Sequence
    tokens: tuple[int, ...]
    drafts: list[int] = field(default_factory=list)

    def asked(self) -> Asked:
        return Asked(self.slot, self.row, self.text.tokens, self.text.length, [(*self.tokens, *self.drafts)])


class Led:
    """The chains of a drafter's engine, step by step."""

    def __init__(self, drafter: Engine, chains: EngineChains, copies: Copies) -> None:
        self._drafter = drafter
        self._chains = chains
        self._copies = copies

    def leads(self, rows: Iterable[Row]) -> bool:
        """Whether the drafts of some of the rows are to be edited."""
        return any(row.draft_slot is not None and self._drafter.is_edited(row.draft_slot) for row in rows)

    def draft(self, begun: Begun, going: Collection[int], after: Callable[[int, Tensor], Tensor]) -> Tensor:
        """The chains, int64 [rows, nodes]: roots, and `steps` drafts below each.

        after: launches the drafter's forward one token further, given how many drafts lie above and the last of these,
        int64 [rows], and returns its logits, float32 [rows, vocab]. Waits for what was launched before at most.
        """
        assert begun.drafting is not None
        paths, logits = self._paths(begun, begun.drafting, going), begun.drafting.logits
        chain = [begun.drafting.chain[:, 0]]
        for step in range(begun.steps):
            if step:
                arrived = self._copies.send(chain[-1]) if paths else None
                logits = after(step, chain[-1])
                if arrived is not None:
                    _follow(paths, arrived()[0].tolist())
            if paths:
                self._drafter.edit(logits, [path.asked() for path in paths])
            chain.append(self._chains.guess(logits, chain[-1], begun.places, step, begun.kind))
        return torch.stack(chain, 1)

    def _paths(self, begun: Begun, roots: Drafted, going: Collection[int]) -> list[_Path]:
        """Of rows whose drafts are to be edited and whose texts go on."""
        rows = [i for i, slot in enumerate(begun.slots) if slot in going and self._is_edited(begun.rows[i])]
        tokens = roots.arrived()[0].tolist() if rows else []
        paths = []
        for i in rows:
            row = begun.rows[i]
            assert row.drafter is not None
            assert row.draft_slot is not None
            text = row.target.tokens[row.drafter.length :]
            paths.append(_Path(i, row.draft_slot, row.drafter, (*text, *tokens[i])))
        return paths

    def _is_edited(self, row: Row) -> bool:
        """Not while its books lack some of the prompt, which is no output; nor where a grammar is not there."""
        own = row.draft_slot
        if row.drafter is None or own is None or not self._drafter.is_edited(own):
            return False
        try:
            is_ready = self._drafter.is_ready(own)
        except BadConstraint:
            return False
        return is_ready and row.drafter.length >= self._drafter.params(own).prompt_tokens


def _follow(paths: Iterable[_Path], drafts: list[int]) -> None:
    """One draft further; drafts: of all rows of the round."""
    for path in paths:
        path.drafts.append(drafts[path.row])


def cut(begun: Begun, drafted: Drafted, going: Collection[int], target: Engine) -> list[list[int]]:
    """The chains, as long as they are, of slots that go on with a constraint: what of each the grammar allows, then
    what it forces (jump-forward, L. Zheng et al., arXiv 2312.07104), then what is left. Waits for the drafts."""
    chains: list[list[int]] = drafted.arrived()[0].tolist()
    for slot, row, chain in zip(begun.slots, begun.rows, chains, strict=True):
        matcher = target.matcher(slot, row.target.tokens) if slot in going else None
        kept = matcher.allowed(chain) if matcher is not None else len(chain)
        if matcher is not None and 0 < kept < len(chain):
            forced = matcher.forced(chain[:kept])[: len(chain) - kept]
            chain[kept : kept + len(forced)] = forced
    return chains
