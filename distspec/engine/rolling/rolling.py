"""Rounds that follow each other before their results are read: the host launches N+1, then reads N; or begins N+1,
reads N, and finishes N+1, where the host has a part in each token. That lies between the target's forward and the draw,
and hides behind the forward: drafts come to the host as soon as they are made, and by then it knows all texts for sure.

Knows which slots roll, how long their texts may have become, and where their pages are. Does not know requests, why a
text ends, or who keeps the books: whoever launches appends what was read to the sequences of both engines, and holds
pages for what is in flight.

Launches are in one stream. So pages that a finished row gave up may still be written by rounds that were launched
before, but only before anybody who got them since.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from distspec.engine.engine import Engine
from distspec.engine.rolling.chains import Chains, EngineChains
from distspec.engine.rolling.copies import Copies
from distspec.engine.rolling.flight import Begun, Drafted, Flight, Judged, Row
from distspec.engine.rolling.graphs import RoundGraphs
from distspec.engine.rolling.led import Led, cut
from distspec.engine.rolling.round import Part, Round
from distspec.engine.rolling.state import Kind, State
from distspec.kv.sequence import Sequence
from distspec.sampling import draw

MakeChains = Callable[[State, int], Chains]
"""For a state, and texts of so many tokens at most."""


class Rolling:
    """Rounds of slots whose state is on the device: length, last tokens, sampling parameters, page tables.

    target: an engine; drafter: another one on its device, or what makes Chains for a state and texts of so many tokens
    at most; None: plain decoding. odds: outcomes and guesses are made up by distspec.synthetic, and an engine's guess
    is right so often as the first of these says; without an engine there are none then.
    """

    def __init__(self, target: Engine, drafter: Engine | MakeChains | None, *, odds: tuple[float, ...] = ()) -> None:
        self._target = target
        self._drafter = drafter if isinstance(drafter, Engine) else None
        self._state = State(target, self._drafter)
        self._chains: Chains | None = None
        if isinstance(drafter, Engine):
            self._chains = EngineChains(self._state, drafter, odds) if drafter.runner.plans is not None else None
        elif drafter is not None and not odds:
            self._chains = drafter(self._state, target.max_model_len)
        self._round = Round(self._state, target, self._chains, odds)
        self._rows: dict[int, Row] = {}
        capture = target.runner.capture
        self._graphs = RoundGraphs(self._round, self._state, capture) if capture is not None else None
        self._copies = Copies(target.device)
        self._led: Led | None = None
        if self._drafter is not None and isinstance(self._chains, EngineChains):
            self._led = Led(self._drafter, self._chains, self._copies)

    def can(self, steps: int) -> bool:
        """Whether rounds of so many drafts run here; 0: plain decoding."""
        return self._target.runner.plans is not None and (steps == 0 or self._chains is not None)

    @torch.inference_mode()
    def prepare(self, steps: int, only_largest: bool = False) -> None:
        """Capture the graphs of rounds of so many drafts now; else each waits for its first round. only_largest: those
        that take the most memory, which the others reuse."""
        if self._graphs is not None:
            self._graphs.prepare(self._parts(steps), only_largest)

    def _parts(self, steps: int) -> list[Part]:
        """All that rounds of so many drafts may be launched as."""
        parts = [Part("whole", steps), Part("judge", steps)]
        if steps:
            parts.append(Part("draft", steps))
        if steps and self._led is not None:
            parts += [Part("root"), Part("further")]
        return parts

    @torch.inference_mode()
    def enter(self, slot: int, root: int, draft_slot: int | None) -> None:
        """Take a slot in. Its sequence holds the text but for the last token, root, and no nodes, and its KV is valid;
        the sequence of a drafter's engine holds at least all but the last two, and its KV up to there is valid.
        draft_slot None: there is no such engine, or no round will draft."""
        sequence = self._target.sequence(slot)
        draft = self._drafter.sequence(draft_slot) if self._drafter is not None and draft_slot is not None else None
        before = sequence.tokens[-1] if sequence.length else 0
        self._rows[slot] = Row(sequence.length + 1, sequence, draft, draft_slot)
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

        Tokens are drawn by seed, temperature, top_k, top_p and min_p alone; see `begin` for others. After a round
        without drafts the drafter lacks a position: a slot that is to draft again leaves and enters anew. Does not wait
        for the device. Raises ValueError where pages or max_model_len are too small for what this round and those that
        are not read yet can write (see `reach`); nothing is changed then.
        """
        rows, kind = self._ready(slots, steps)
        results = self._computed(Part("whole", steps), slots, kind)
        return Flight(tuple(slots), steps, rows, self._copies.send(results.clone()))

    @torch.inference_mode()
    def begin(self, slots: Seq[int], steps: int) -> Begun:
        """As `launch`, for slots whose logits are to be edited or told of, and any others beside them: what needs no
        host, which `finish` goes on from. The last token of a text that is edited is output."""
        rows, kind = self._ready(slots, steps)
        places = self._state.upload(slots)
        begun = Begun(tuple(slots), steps, rows, kind, places)
        roots = self._state.last.index_select(0, places)[:, 1:].contiguous()
        if steps and self._led is not None and self._led.leads(rows):
            assert self._drafter is not None
            arrived, hidden = self._copies.send(roots), self._computed(Part("root"), slots, kind)
            return replace(begun, drafting=Judged(roots, arrived, self._drafter.model.logits(hidden)))
        chain = self._computed(Part("draft", steps), slots, kind).clone() if steps else roots
        if steps and self._led is None and any(self._target.params(slot).constraint for slot in slots):
            return replace(begun, drafted=Drafted(chain, self._copies.send(chain)))
        return replace(begun, judged=self._judged(begun, chain))

    @torch.inference_mode()
    def finish(self, begun: Begun, going: Collection[int]) -> Flight:
        """Launch the rest: drafts, if these are edited, and the target's forward; what edits the logits, the draw, and
        the state of the next round. Once only.

        going: the slots of it whose texts go on; what the round brings the others must mean nothing to anybody. The
        books hold what all rounds before have brought these. Waits for the drafts at most, and so hides behind the
        forward; but not where constraints cut drafts that have no logits. Raises BadConstraint if the grammar of a slot
        turned out to be none.
        """
        target, nodes, judged = self._target, begun.steps + 1, begun.judged
        if judged is None:
            judged = self._judged(begun, self._chain(begun, going))
        telling = target.telling([target.params(slot) for slot in begun.slots for _ in range(nodes)])
        telling.before(judged.logits)
        target.edit(judged.logits, judged.asked(begun, {slot for slot in going if target.is_edited(slot)}))
        rows = self._round.rows(begun.places, nodes)
        sampling = begun.kind.rows(rows.reals, rows.integers, nodes)
        drawn = draw(judged.logits, sampling)
        told = telling.after(judged.logits, sampling, drawn)
        results = self._round.settle(begun.places, judged.chain, rows, drawn)
        if told is None:
            return Flight(begun.slots, begun.steps, begun.rows, self._copies.send(results))
        arrived = self._copies.send(results, told.integers, told.reals)
        return Flight(begun.slots, begun.steps, begun.rows, arrived, telling)

    def _chain(self, begun: Begun, going: Collection[int]) -> Tensor:
        """The drafts, of which those that a constraint forbids or forces are made with the host's help."""
        if begun.drafted is not None:
            chains = cut(begun, begun.drafted, going, self._target)
            return self._state.upload([token for chain in chains for token in chain]).view_as(begun.drafted.chain)
        assert self._led is not None
        return self._led.draft(begun, going, partial(self._further, begun))

    def _judged(self, begun: Begun, chain: Tensor) -> Judged:
        """The target's forward is launched. The chains go to the host beside it."""
        arrived = self._copies.send(chain)
        hidden = self._computed(Part("judge", begun.steps), begun.slots, begun.kind, chain)
        return Judged(chain, arrived, self._target.model.logits(hidden))

    def _further(self, begun: Begun, drafts: int, last: Tensor) -> Tensor:
        """The drafter's forward is launched, one token further; its logits, float32 [rows, vocab]."""
        assert isinstance(self._chains, EngineChains)
        assert self._drafter is not None
        self._chains.move(drafts)
        return self._drafter.model.logits(self._computed(Part("further"), begun.slots, begun.kind, last[:, None]))

    def _computed(self, part: Part, slots: Seq[int], kind: Kind, fed: Tensor | None = None) -> Tensor:
        """One part of a round, in a graph or kernel by kernel. The next one may overwrite what it leaves."""
        found = self._graphs.run(part, slots, kind, fed) if self._graphs is not None else None
        if found is not None:
            return found
        places = self._state.upload(slots)
        return self._round.compute(part, places, kind, places[:, None] if fed is None else fed)

    def _ready(self, slots: Seq[int], steps: int) -> tuple[list[Row], Kind]:
        """Slots whose next round is launched now."""
        for slot in slots:
            self._check(slot, steps)
        rows = [self._rows[slot] for slot in slots]
        self._update(slots, rows, steps)
        for row in rows:
            row.bound += steps + 1
        return rows, Kind.of([self._target.params(slot) for slot in slots])

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

    def _update(self, slots: Seq[int], rows: Seq[Row], steps: int) -> None:
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
