"""What all drafters share that read the target's features: their texts, and KV and features of these in pages.

Knows texts, features and pages, and which texts must give theirs up for others. Does not know how a tree grows.

Position p of a text, from the second on, is row p - 1 of its sequence: a token with the feature of the position that
drew it. The first token has no such position and no row, as the published models are trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from distspec import config
from distspec.attention import Span, choose
from distspec.constraints import Grammars, Hint
from distspec.copies import integers
from distspec.drafters.base import Called, DraftRow, Proposal, check_row, common, limited, never
from distspec.drafters.sprout import Sprout
from distspec.engine import Guesses
from distspec.engine.acceptance import COUPLED, Acceptance
from distspec.engine.sizing import pages_that_fit, pool_of
from distspec.errors import InvalidValue, OutOfPages
from distspec.kv import sequence as kv
from distspec.kv.pages import PageAllocator
from distspec.models.base import Paged
from distspec.models.config import ModelConfig
from distspec.protocol.values import SamplingParams, Shape
from distspec.sampling import Asked, Editor, SamplingRows, edited

Path = tuple[int, ...]
"""Tokens below the end of a text."""


class Enters(Protocol):
    """The part of a draft model that is needed here; see models.FeatureModel."""

    config: ModelConfig
    dtype: torch.dtype
    taps: tuple[int, ...]
    width: int

    def enter(self, features: Tensor) -> Tensor: ...


@dataclass(slots=True)
class Text:
    """A committed text, and the tree below it.

    edits: its slot in the drafter's Editor; None where its logits stay as they are. sequence: rows of its tokens from
    the second on, and of nodes; None where nothing is held. saved: their features as they entered, on the host, where
    there is no sequence. computed: nodes with KV. right: how many committed rows were computed from the target's
    features, and not as nodes. steps: how many more this turn is to grow.
    """

    tokens: list[int] = field(default_factory=list)
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=1))
    edits: int | None = None
    sequence: kv.Sequence | None = None
    saved: Tensor | None = None
    tree: Sprout = field(default_factory=Sprout)
    computed: set[int] = field(default_factory=set)
    right: int = 0
    shape: Shape = field(default_factory=lambda: Shape(steps=0))
    steps: int = 0


class _Edits:
    """What the requests of texts change of their logits, each text in a slot of its own if it does."""

    def __init__(self, vocab: int, device: torch.device, grammars: Grammars | None) -> None:
        self._editor = Editor(vocab, device)
        self._grammars = grammars
        self._free: list[int] = []
        self._slots = count()

    def open(self, text: Text) -> None:
        """Begin, or begin anew after a cut: what was counted of the text is forgotten."""
        if text.edits is None and edited(text.params):
            text.edits = heappop(self._free) if self._free else next(self._slots)
        if text.edits is not None:
            self._editor.open(text.edits, text.params, Hint.of(text.params, self._grammars))

    def close(self, text: Text) -> None:
        if text.edits is not None:
            self._editor.close(text.edits)
            heappush(self._free, text.edits)
            text.edits = None

    def apply_(self, logits: Tensor, texts: Sequence[Text], paths: Sequence[Path]) -> None:
        """logits: float32 [rows, vocab], each row of a text and what else it follows."""
        asked = [
            Asked(text.edits, row, text.tokens, len(text.tokens), [path])
            for row, (text, path) in enumerate(zip(texts, paths, strict=True))
            if text.edits is not None
        ]
        for edit in self._editor.edits(asked):
            edit.apply_(logits)


Model = TypeVar("Model", bound=Enters)


class FeatureDrafter(ABC, Generic[Model]):
    """The part of such a drafter that does not depend on its model; see Drafter.

    kept: vectors of the model's hidden size that are kept of each row beside its KV; the first is what entered. taps:
    what it needs of the target, see models.Taps: DraftRow.features has these. When pages run out, the texts
    drafted for least recently give theirs up; their features wait on the host until their turn comes.
    """

    kept: ClassVar[int]

    def __init__(
        self,
        model: Model,
        options: config.Engine,
        *,
        max_model_len: int,
        device: torch.device,
        acceptance: Acceptance = COUPLED,
        grammars: Grammars | None = None,
        is_called: Called = never,
    ) -> None:
        """max_model_len: of the target; texts longer than the pool holds get no drafts. acceptance: the target's.
        is_called: a turn of many forwards ends early then.

        Raises InvalidValue if the pool holds none.
        """
        shape = model.config
        self.taps = model.taps
        self.device = device
        self.budget = options.max_num_batched_tokens
        self.room = options.max_scratch_nodes
        self._model = model
        self._acceptance = acceptance
        self._is_called = is_called
        pages = pages_that_fit(shape, options, max_model_len, model.dtype, device, self.kept * shape.hidden_size)
        if options.tokens_in(pages) < 1:
            raise InvalidValue("engine.num_pages", pages, f"at least {options.pages_for(1)}, one request of one token")
        self.max_model_len = min(max_model_len, options.tokens_in(pages))
        self.pool = pool_of(shape, pages * options.page_size, self.kept * shape.hidden_size, model.dtype, device)
        self._books = kv.Books(PageAllocator(pages, options.page_size), None)
        self._edits = _Edits(shape.vocab_size, device, grammars)
        self._texts: dict[int, Text] = {}  # least recently used first
        backend, _ = choose(options.attention_backend, device, model.dtype, latent=shape.latent is not None)
        self._attention = backend(self.pool, options.page_size, shape.num_heads)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        """As Drafter.propose. Raises ValueError, with nothing changed, for a row without the features it needs."""
        for row in rows:
            known = self._texts.get(row.request)
            check_row(row, len(known.tokens) if known else 0)
            self._check_features(row)
        texts = [self._touch(row.request) for row in rows]
        for text, row in zip(texts, rows, strict=True):
            self._turn(text, row, texts)
        is_over = self._grow(texts)
        return [
            text.tree.proposal() if is_over or not text.steps else Proposal((), (), left=text.steps) for text in texts
        ]

    def forget(self, request: int) -> None:
        """Free what is held of a request; one that is not known is fine."""
        text = self._texts.pop(request, None)
        if text is not None:
            self._close(text)
            self._edits.close(text)

    def check(self) -> None:
        """Prove that every page has exactly its holders. Raises AssertionError."""
        self._books.check(text.sequence for text in self._texts.values() if text.sequence is not None)

    # -- for the drafters ----------------------------------------------------------------------

    @abstractmethod
    def _grow(self, texts: Sequence[Text]) -> bool:
        """Grow the trees of texts as their shapes and steps say; False if the drafter was called away from it."""

    def attend(self, spans: Sequence[Span]) -> Paged:
        """Attention of one forward over these rows."""
        plan = self._attention.plan(spans)
        return Paged(self.pool.layers, plan.write, partial(self._attention.read, plan))

    def hold(self, text: Text, rows: int, busy: Sequence[Text]) -> bool:
        """Room for so many more rows; a text that gets none, even with the idle ones closed, is closed itself."""
        assert text.sequence is not None
        if self._reserve(text.sequence, rows, busy):
            return True
        self._put_away(text)
        return False

    def guesses(
        self, logits: Tensor, texts: Sequence[Text], paths: Sequence[Path], draws: Sequence[int]
    ) -> list[Guesses]:
        """What may follow each row, in as many guesses as the widest of the shapes asks for.

        logits: float32 [rows, vocab], changed as the requests ask. texts, paths: of each row, what it follows. draws:
        absolute position of the token that follows it.
        """
        self._edits.apply_(logits, texts, paths)
        rows = SamplingRows.of([text.params for text in texts], draws, self.device)
        most = max(text.shape.topk for text in texts)
        found = self._acceptance.guess(logits, rows, (len(text.tokens) for text in texts), most)
        return found.told(found.tokens, found.scores)

    def locations(self, sequence: kv.Sequence, indices: Iterable[int]) -> list[int]:
        return [sequence.location(index) for index in indices]

    def vectors(self) -> Tensor:
        """[locations * kept, hidden_size]: what is kept of location l begins at row l * kept. A view."""
        return self.pool.features.view(-1, self._model.config.hidden_size)

    def integers(self, values: Sequence[int]) -> Tensor:
        return integers(values, self.device)

    # -- texts ---------------------------------------------------------------------------------

    def _check_features(self, row: DraftRow) -> None:
        wanted = (len(row.tokens), self._model.width)
        found = None if row.features is None else tuple(row.features.shape)
        if row.tokens and found != wanted:
            raise ValueError(f"request {row.request}: features of shape {found}, need {wanted} for taps {self.taps}")

    def _touch(self, request: int) -> Text:
        text = self._texts.pop(request, None) or Text()
        self._texts[request] = text
        return text

    def _turn(self, text: Text, row: DraftRow, busy: Sequence[Text]) -> None:
        """Make the text what the row says; keep what was computed as far as it still holds."""
        known, first = len(text.tokens), max(row.keep, 1)
        same = row.keep + common(text.tokens[row.keep :], row.tokens)
        tail, entered = row.tokens[known - row.keep :], self._entered(row)
        del text.tokens[row.keep :]
        text.tokens += row.tokens
        text.params = row.params
        text.shape, text.steps = limited(row.shape, self.max_model_len - len(text.tokens)), row.shape.steps
        if text.sequence is not None and same == known and len(text.tokens) <= self.max_model_len:
            self._advance(text, tail, entered[known - first :], busy)
        else:
            entered = torch.cat((self._features(text)[: first - 1], entered))
            self._close(text)
            self._edits.open(text)
            self._open(text, entered, busy)

    def _entered(self, row: DraftRow) -> Tensor:
        """[n, hidden_size]: features of the row's tokens, but for the first of a text."""
        if row.features is None or not row.tokens:
            return self._nothing()
        return self._model.enter(row.features.to(self.device, self._model.dtype)[0 if row.keep else 1 :])

    def _nothing(self) -> Tensor:
        return torch.empty(0, self._model.config.hidden_size, dtype=self._model.dtype, device=self.device)

    def _advance(self, text: Text, tail: tuple[int, ...], entered: Tensor, busy: Sequence[Text]) -> None:
        """The text grew by `tail`: commit the nodes that it followed, drop what it left behind."""
        if not tail:
            return
        if not self.hold(text, len(tail), busy):
            assert text.saved is not None
            text.saved = torch.cat((text.saved, entered.cpu()))
            return
        assert text.sequence is not None
        kept, gone = text.tree.advance(tail)
        done = [node for node in kept if node in text.computed]
        moves = text.sequence.commit(done, [node for node in gone if node in text.computed])
        if moves:
            sources, destinations = (
                self.integers(self.locations(text.sequence, side)) for side in zip(*moves, strict=True)
            )
            self.pool.move(sources, destinations)
        text.computed.difference_update(kept, gone)
        self._append(text, tail[len(done) :], entered)

    def _append(self, text: Text, tokens: Sequence[int], entered: Tensor) -> None:
        """Commit tokens, whose room is held; `entered` belongs to the last rows, some of which may have been nodes."""
        assert text.sequence is not None
        text.sequence.append(tokens)
        indices = range(text.sequence.length - len(entered), text.sequence.length)
        self.vectors().index_copy_(0, self._entries(text.sequence, indices), entered)

    def _open(self, text: Text, entered: Tensor, busy: Sequence[Text]) -> None:
        """Take pages; without, or past the model's length, this text gets no drafts."""
        sequence, tokens = self._books.open(()), text.tokens[1:]
        if not 1 < len(text.tokens) <= self.max_model_len or not self._reserve(sequence, len(tokens), busy):
            text.saved = entered.cpu()
            return
        text.sequence = sequence
        self._append(text, tokens, entered)

    def _features(self, text: Text) -> Tensor:
        """[rows, hidden_size]: what entered, a copy on the device."""
        if text.sequence is not None:
            return self.vectors().index_select(0, self._entries(text.sequence, range(text.sequence.length)))
        return self._nothing() if text.saved is None else text.saved.to(self.device)

    def _entries(self, sequence: kv.Sequence, indices: Iterable[int]) -> Tensor:
        return self.integers([location * self.kept for location in self.locations(sequence, indices)])

    def _close(self, text: Text) -> None:
        if text.sequence is not None:
            self._books.close(text.sequence)
        text.sequence = text.saved = None
        text.right = 0
        text.tree.clear()
        text.computed.clear()

    def _put_away(self, text: Text) -> None:
        """Close a text, so that it can be opened again."""
        features = self._features(text).cpu()
        self._close(text)
        text.saved = features

    def _reserve(self, sequence: kv.Sequence, rows: int, busy: Sequence[Text]) -> bool:
        while True:
            try:
                sequence.reserve(rows)
                return True
            except OutOfPages:
                idle = (t for t in self._texts.values() if t.sequence is not None and not any(t is b for b in busy))
                victim = next(idle, None)
                if victim is None:
                    return False
                self._put_away(victim)
