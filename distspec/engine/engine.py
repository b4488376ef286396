"""The target engine: slots with paged KV, and a step that takes whatever rows are ready.

Knows one model, its KV pool and the sampling parameters of each slot. Does not know drafters, rounds, which
request sits in a slot, or what an outcome will be used for. Prefill chunk, decode token and verify tree are
the same operation here: a segment of tokens and nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

import torch
from torch import Tensor

from distspec import config
from distspec.constraints import Grammars, Guide, Matcher
from distspec.copies import fetch, integers, to_device
from distspec.engine.acceptance import COUPLED, Acceptance
from distspec.engine.batch import Batch, Guesses, Outcome, Segment
from distspec.engine.reports import Reports
from distspec.engine.runner import Runner
from distspec.engine.sizing import pages_that_serve, pool_of
from distspec.errors import InvalidValue, OutOfSlots
from distspec.kv.pages import PageAllocator
from distspec.kv.radix import PrefixCache
from distspec.kv.sequence import Books, Move, Sequence
from distspec.models.base import Model
from distspec.protocol.values import SamplingParams
from distspec.sampling import Asked, Editor, SamplingRows
from distspec.sampling.logprobs import Telling

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Slot:
    """shared: its prompt may go to the prefix cache while it runs."""

    sequence: Sequence
    params: SamplingParams
    shared: bool


@dataclass(frozen=True, slots=True)
class Guessing:
    """A step of guesses under way. tokens: int64 [wanted rows, most], on the device; None if no step may build on them,
    since their laws matter too. read: waits for them, see Engine.guess."""

    tokens: Tensor | None
    read: Callable[[], list[Outcome[Guesses]]]


class Engine:
    """One model on one device.

    capacity: KV positions of the pool. max_model_len: committed tokens and path of one slot, at most.
    slots: requests held at once. pool: of its KV and features. runner: of its forward; others plan forwards there too.
    taps: where in the model features are read, see models.Taps; what they are for, it does not know. acceptance: how it
    guesses, as a drafter's, and judges, as the target's. grammars: of the model's tokenizer; without, requests with a
    constraint cannot be held to it. launched: called in each step when the model's layers are launched and its outcomes
    not drawn yet: KV of the positions that it commits is there when what this thread has launched so far is done.
    """

    def __init__(
        self,
        model: Model,
        options: config.Engine,
        *,
        device: torch.device,
        max_model_len: int | None = None,
        taps: Seq[int] = (),
        acceptance: Acceptance = COUPLED,
        grammars: Grammars | None = None,
    ) -> None:
        """max_model_len None: the model's own, or what the pool holds beside scratch nodes if that is less.

        Raises InvalidValue if the model has no such taps, or it or the pool cannot hold what is configured.
        """
        shape, features = model.config, len(taps) * model.config.hidden_size
        if not all(0 <= layer <= shape.num_layers for layer in taps):
            raise InvalidValue("taps", list(taps), f"layers of the target, 0 to {shape.num_layers}")
        pages = pages_that_serve(shape, options, max_model_len, model.dtype, device, features)
        self.model = model
        self.device = device
        self.page_size = options.page_size
        self.slots = options.max_num_seqs
        self.capacity = pages * options.page_size
        self.max_model_len = min(max_model_len or shape.max_position, options.tokens_in(pages))
        self.pool = pool_of(shape, self.capacity, features, model.dtype, device)
        log.info("%d KV pages of %d positions on %s", pages, options.page_size, device)
        self.runner = Runner(
            model, self.pool, options, taps=tuple(taps), max_model_len=self.max_model_len, device=device
        )
        allocator = PageAllocator(pages, options.page_size)
        self.books = Books(allocator, PrefixCache(allocator) if options.prefix_cache else None)
        self._editor = Editor(shape.vocab_size, device)
        self._grammars = grammars
        self._guides: dict[int, Guide] = {}
        self._acceptance = acceptance
        self._logprobs_mode = options.logprobs_mode
        self.launched: Callable[[], None] = lambda: None
        self._open: dict[int, _Slot] = {}
        self._doubted: set[int] = set()  # slots whose books may say more than was computed
        self._free = list(range(self.slots))  # a heap

    # -- slots ---------------------------------------------------------------------------------

    def open(self, tokens: Seq[int], params: SamplingParams, use_cache: bool = True) -> int:
        """A slot for a request that begins with `tokens`; sequence(slot).length of them were cached.

        use_cache False: computes everything itself, and shares nothing before it is closed. Raises OutOfSlots.
        """
        if not self._free:
            raise OutOfSlots(self.slots)
        slot = heappop(self._free)
        self._open[slot] = _Slot(self.books.open(tokens, use_cache), params, use_cache)
        try:
            guide = Guide.of(params, self._grammars)
            if guide is not None:
                self._guides[slot] = guide
            self._editor.open(slot, params, guide)
        except BaseException:  # as where memory ran out for what edits need: nobody knows the slot yet
            self.close(slot)
            raise
        return slot

    def is_ready(self, slot: int) -> bool:
        """Whether a step would not have to wait for the slot's grammar. Raises BadConstraint if there will be none."""
        return slot not in self._guides or self._guides[slot].is_ready()

    def sequence(self, slot: int) -> Sequence:
        return self._open[slot].sequence

    def params(self, slot: int) -> SamplingParams:
        return self._open[slot].params

    def reserve(self, slot: int, positions: int) -> None:
        """Hold pages for so many more tokens and nodes. Raises OutOfPages; nothing is changed then."""
        self.sequence(slot).reserve(positions)

    def commit(self, slot: int, ids: Seq[int], drop: Seq[int] = ()) -> None:
        """Drop nodes, commit a path of nodes, and bring their KV and features to the committed end.

        Raises IllegalTransition as Sequence.commit; nothing is changed then.
        """
        self._move(slot, self.sequence(slot).commit(ids, drop))

    def close(self, slot: int, keep: bool = True) -> None:
        """Free a slot. keep False: its KV is not trusted or not wanted in the prefix cache. That of a slot for which a
        step or a commit broke, as where memory ran out, is never trusted."""
        self.books.close(self._open.pop(slot).sequence, keep and slot not in self._doubted)
        self._doubted.discard(slot)
        self._editor.close(slot)
        self._guides.pop(slot, None)
        heappush(self._free, slot)

    def check(self) -> None:
        """Prove that free + cached + held pages are all pages. Raises AssertionError."""
        self.books.check(slot.sequence for slot in self._open.values())

    # -- steps ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, segments: Seq[Segment]) -> list[Outcome[int]]:
        """Commit the tokens and add the nodes of each segment, run the model once, draw the outcomes.

        A slot appears at most once, and its room is reserved. Raises IllegalTransition for nodes whose parents
        are not there, ValueError for missing room or a length over max_model_len; nothing is changed then.
        """
        reports = Reports(self._logprobs_mode, self.device)
        found, drawn = self._run(segments, reports), list[int]()
        if found:
            tokens = self._acceptance.judge(*found, segments)
            reports.after(*found, tokens)
            drawn = tokens.tolist()
        outcomes = Batch.outcomes(segments, drawn)
        reports.deal(segments, outcomes)
        return outcomes

    @torch.inference_mode()
    def guess(self, segments: Seq[Segment], most: int, before: Guessing | None = None) -> Guessing:
        """As `step`, but for a drafter, and waits for nothing: at most `most` guesses after each row, as its acceptance
        makes them. before: the step of guesses begun last, which need not have been read: for tokens of nodes its
        guesses may stand in, see stand_in.

        Whoever does that says what the tokens are once they are known (Sequence.name), before this step is read. Not in
        slots whose rows are edited, since edits look at tokens.
        """
        found = self._run(segments, guesses=before.tokens if before is not None else None)
        if not found:
            return Guessing(None, partial(Batch.outcomes, segments, []))
        lengths = (self.sequence(segment.slot).length for segment in segments for _ in range(segment.wanted))
        guessed = self._acceptance.guess(*found, lengths, most)
        there = fetch(guessed.tokens, guessed.scores)
        tokens = guessed.tokens if guessed.laws is None else None
        return Guessing(tokens, lambda: Batch.outcomes(segments, guessed.told(*there())))

    def _run(
        self, segments: Seq[Segment], reports: Reports | None = None, guesses: Tensor | None = None
    ) -> tuple[Tensor, SamplingRows] | None:
        """Book the segments and run the model: logits of the wanted rows and how they are to be drawn; None if
        nothing is wanted. guesses: see Batch."""
        for segment in segments:
            end = self.sequence(segment.slot).check(len(segment.committed), segment.nodes)
            if end > self.max_model_len:
                raise ValueError(
                    f"slot {segment.slot} would grow to {end} tokens, max_model_len is {self.max_model_len}"
                )
        if len({segment.slot for segment in segments}) != len(segments):
            raise ValueError("a slot appears twice in one step")
        batch = Batch(guesses=guesses)
        with self._doubting(segment.slot for segment in segments):
            for segment in segments:
                slot = self._open[segment.slot]
                batch.add(segment, slot.sequence, slot.params, segment.slot in self._editor)
            found = self._forward(batch, reports) if batch.tokens else None
        for segment in segments:
            # Requests that arrive while this one runs can share its prompt; a bet may be taken back.
            if len(segment.tokens) > 1 and segment.bet is None and self._open[segment.slot].shared:
                self.books.publish(self.sequence(segment.slot))
        return found

    def _forward(self, batch: Batch, reports: Reports | None) -> tuple[Tensor, SamplingRows] | None:
        """Logits of the wanted rows and how they are to be drawn; None if nothing is wanted."""
        logits_of = self.runner.run(batch)
        self.launched()
        if reports is not None:
            reports.give(batch, logits_of)
        if not batch.wanted:
            return None
        logits = logits_of(batch.wanted)
        if reports is not None:
            reports.before(batch, logits)
        self.edit(logits, batch.asked)
        return logits, self._sampling(batch)

    def _sampling(self, batch: Batch) -> SamplingRows:
        return SamplingRows.of(batch.params, batch.draws, self.device)

    # -- what others need who draw by themselves -------------------------------------------------

    @property
    def is_coupled(self) -> bool:
        """Drafts are judged by the outcome that the noise of their position draws anyway."""
        return self._acceptance is COUPLED

    def is_edited(self, slot: int) -> bool:
        """Whether the logits of its rows must be edited before they are drawn from."""
        return slot in self._editor

    def matcher(self, slot: int, text: Seq[int]) -> Matcher | None:
        """Of a slot's grammar, at the end of a text; None for a slot without. Raises as `edit`."""
        return self._guides[slot].at(text) if slot in self._guides else None

    def edit(self, logits: Tensor, asked: Seq[Asked]) -> None:
        """Edit logits in place, of rows of slots for which `is_edited` holds: float32 [rows, vocab]. The host works it
        out while the device computes them. Raises BadConstraint if the grammar of a slot turned out to be none."""
        for edit in self._editor.edits(asked):
            edit.apply_(logits)

    def telling(self, params: Seq[SamplingParams]) -> Telling:
        """Logprobs of rows of these parameters, of the distribution that the options name."""
        return Telling(params, self._logprobs_mode == "raw_logprobs", self.device)

    # -- what is kept of positions, out and in ---------------------------------------------------

    @torch.inference_mode()
    def features(self, slot: int, indices: Seq[int]) -> Tensor:
        """Features at logical indices of the slot's sequence, where committed positions are their own:
        [len(indices), len(taps) * hidden_size] of the model's dtype, a copy. Those of a position are valid when its KV
        is, wherever that came from."""
        return self.pool.features.index_select(0, self._locations(slot, indices))

    @torch.inference_mode()
    def gather(self, slot: int, start: int, length: int) -> Tensor:
        """KV, and features if there are taps, of committed positions start .. start+length-1: see KVPool.gather."""
        return self.pool.gather(self._rows_of(slot, start, length))

    @torch.inference_mode()
    def scatter(self, slot: int, start: int, content: Tensor) -> None:
        """Write what `gather` returned on another engine with the same model and taps to positions from `start` on,
        whose room is reserved."""
        positions = content.numel() // self.pool.width
        self.pool.scatter(self._rows_of(slot, start, positions), content)

    # -- helpers -------------------------------------------------------------------------------

    @torch.inference_mode()
    def _move(self, slot: int, moves: Seq[Move]) -> None:
        if moves:
            sources, destinations = zip(*moves, strict=True)
            with self._doubting([slot]):
                self.pool.move(self._locations(slot, sources), self._locations(slot, destinations))

    @contextmanager
    def _doubting(self, slots: Iterable[int]) -> Iterator[None]:
        """Books are changed before the device is asked for what they say: if that breaks, nobody may share it."""
        try:
            yield
        except BaseException:
            self._doubted.update(slots)
            raise

    def _locations(self, slot: int, indices: Seq[int]) -> Tensor:
        sequence = self.sequence(slot)
        return integers([sequence.location(index) for index in indices], self.device)

    def _rows_of(self, slot: int, start: int, length: int) -> Tensor:
        """Locations of committed positions, by the page: there may be thousands."""
        pages, offset, size = self.sequence(slot).spots(start, length)
        rows = torch.tensor(pages, dtype=torch.int64)[:, None] * size + torch.arange(size)
        return to_device(rows.flatten()[offset : offset + length], self.device)
