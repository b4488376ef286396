"""Rounds that follow each other before their results are read: the host launches N+1, then reads N.

Knows which slots roll, how long their texts may have become, and where their pages are. Does not know requests, why a
text ends, or who keeps the books: whoever launches appends what was read to the sequences of both engines, and holds
pages for what is in flight.

Launches are in one stream. So pages that a finished row gave up may still be written by rounds that were launched
before, but only before anybody who got them since.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distspec.engine.engine import Engine
from distspec.engine.rolling.chains import Chains, EngineChains
from distspec.engine.rolling.graphs import Bucket, RoundGraphs
from distspec.engine.rolling.round import Round
from distspec.engine.rolling.state import Kind, State
from distspec.kv.sequence import Sequence


@dataclass(slots=True)
class _Row:
    """A slot that rolls. bound: tokens that its text has at most after all that was launched. target, drafter: its
    sequences; known: pages of each that the device knows."""

    bound: int
    target: Sequence
    drafter: Sequence | None
    known: list[int] = field(default_factory=list)
    draft_known: list[int] = field(default_factory=list)


Results = Callable[[], list[list[int]]]
"""Waits for results of a round, see Round, and returns them."""


class Flight:
    """One round that was launched. slots: in it, in order; steps: drafts of each."""

    def __init__(self, slots: tuple[int, ...], steps: int, rows: list[_Row], results: Results) -> None:
        self.slots = slots
        self.steps = steps
        self._rows = rows
        self._results = results

    def read(self) -> list[tuple[int, ...]]:
        """The tokens that each slot's round committed, 1 .. steps + 1 of them: the drafts that were accepted, then the
        target's own. Waits for this round, and for none that was launched later. Once only."""
        rows, self._rows = self._rows, []
        found = []
        for row, (accepted, *outcomes) in zip(rows, self._results(), strict=True):
            row.bound -= self.steps - accepted
            found.append(tuple(outcomes[: accepted + 1]))
        return found


MakeChains = Callable[[State, int], Chains]
"""For a state, and texts of so many tokens at most."""


class Rolling:
    """Rounds of slots whose state is on the device: length, last tokens, sampling parameters, page tables.

    target: an engine; drafter: another one on its device, or what makes Chains for a state and texts of so many tokens
    at most; None: plain decoding. Rows are drawn by seed, temperature, top_k, top_p and min_p alone. odds: outcomes and
    guesses are made up by distspec.synthetic, and an engine's guess is right so often as the first of these says;
    without an engine there are none then.
    """

    def __init__(self, target: Engine, drafter: Engine | MakeChains | None, *, odds: tuple[float, ...] = ()) -> None:
        self._target = target
        self._drafter = drafter if isinstance(drafter, Engine) else None
        self._state = State(target, self._drafter)
        self._chains: Chains | None = None
        if isinstance(drafter, Engine):
            self._chains = EngineChains(self._state, drafter, odds) if drafter.plans is not None else None
        elif drafter is not None and not odds:
            self._chains = drafter(self._state, target.max_model_len)
        self._round = Round(self._state, target, self._chains, odds)
        self._rows: dict[int, _Row] = {}
        self._graphs = RoundGraphs(self._round, self._state) if target.graphs is not None else None
        cuda = target.device.type == "cuda"
        self._copies = torch.cuda.Stream(target.device) if cuda else None  # type: ignore[no-untyped-call]

    def can(self, steps: int) -> bool:
        """Whether rounds of so many drafts run here; 0: plain decoding."""
        return self._target.plans is not None and (steps == 0 or self._chains is not None)

    @torch.inference_mode()
    def prepare(self, steps: int) -> None:
        """Capture the graphs of rounds of so many drafts now, largest first, so that the others reuse its memory; else
        each waits for its first round."""
        if self._graphs is not None:
            for power in reversed(range((self._target.slots - 1).bit_length() + 1)):
                self._graphs.captured(Bucket(1 << power, steps, truncates=False))

    @torch.inference_mode()
    def enter(self, slot: int, root: int, draft_slot: int | None) -> None:
        """Take a slot in. Its sequence holds the text but for the last token, root, and no nodes, and its KV is valid;
        the sequence of a drafter's engine holds at least all but the last two, and its KV up to there is valid.
        draft_slot None: there is no such engine, or no round will draft."""
        sequence = self._target.sequence(slot)
        draft = self._drafter.sequence(draft_slot) if self._drafter is not None and draft_slot is not None else None
        before = sequence.tokens[-1] if sequence.length else 0
        self._rows[slot] = _Row(sequence.length + 1, sequence, draft)
        self._state.enter(slot, sequence.length + 1, (before, root), self._target.params(slot))
        if self._chains is not None:
            self._chains.enter(slot, [*sequence.tokens, root])

    def leave(self, slot: int) -> None:
        """Forget a slot. Rounds in flight go on and can be read; they may write to its pages until they end."""
        del self._rows[slot]

    def reach(self, slot: int, steps: int) -> int:
        """Positions, from the first one on, that both sequences of the slot must have pages for when its next round is
        launched with so many drafts. More than max_model_len is refused."""
        return self._rows[slot].bound + steps

    @torch.inference_mode()
    def launch(self, slots: Seq[int], steps: int) -> Flight:
        """One round of these slots: `steps` drafts each, verify, draw, accept, and the state of the next round.

        After a round without drafts the drafter lacks a position: a slot that is to draft again leaves and enters anew.
        Does not wait for the device. Raises ValueError where pages or max_model_len are too small for what this round
        and those that are not read yet can write (see `reach`); nothing is changed then.
        """
        for slot in slots:
            self._check(slot, steps)
        rows = [self._rows[slot] for slot in slots]
        self._update(slots, rows, steps)
        kind = Kind.of([self._target.params(slot) for slot in slots])
        results = self._graphs.run(slots, steps, kind) if self._graphs is not None else None
        if results is None:
            results = self._round(self._state.upload(slots), steps, kind)
        for row in rows:
            row.bound += steps + 1
        return Flight(tuple(slots), steps, rows, self._sent(results))

    def _sent(self, results: Tensor) -> Results:
        """To the host, beside what is launched next."""
        if self._copies is None:
            return results.tolist
        own = results.clone()  # the next round writes to the same place
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        host = torch.empty(own.shape, dtype=own.dtype, pin_memory=True)
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            host.copy_(own, non_blocking=True)
            arrived.record()
        own.record_stream(self._copies)

        def results_there() -> list[list[int]]:
            arrived.synchronize()
            return host.tolist()

        return results_there

    def _check(self, slot: int, steps: int) -> None:
        row, reach = self._rows[slot], self.reach(slot, steps)
        sides = [(self._target, row.target)]
        if steps and self._drafter is not None:
            if row.drafter is None:
                raise ValueError(f"slot {slot} has no drafter's slot")
            sides.append((self._drafter, row.drafter))
        for engine, sequence in sides:
            room = min(engine.max_model_len, len(sequence.pages) * engine.page_size)
            if reach > room:
                raise ValueError(f"slot {slot} may grow to {reach} tokens, there is room for {room}")

    def _update(self, slots: Seq[int], rows: Seq[_Row], steps: int) -> None:
        """Tell the device of pages that are new since the last round."""
        changes: list[tuple[int, int, int]] = []
        drafts: list[tuple[int, int, int]] = []
        for slot, row in zip(slots, rows, strict=True):
            changes += _news(slot, row.known, row.target, self._target.page_size)
            if row.drafter is not None and self._drafter is not None and steps:
                drafts += _news(slot, row.draft_known, row.drafter, self._drafter.page_size)
        self._state.pages(self._state.tables, changes)
        self._state.pages(self._state.draft_tables, drafts)


def _news(slot: int, known: list[int], sequence: Sequence, page_size: int) -> list[tuple[int, int, int]]:
    """(slot, index, page) of pages that `known` lacks; it has them then. Those that hold committed positions stay what
    they are."""
    start = min(len(known), sequence.length // page_size)
    tail = sequence.pages[start:]
    old, known[start:] = known[start:], tail
    return [(slot, start + i, page) for i, page in enumerate(tail) if i >= len(old) or old[i] != page]
