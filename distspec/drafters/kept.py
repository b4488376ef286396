"""The texts of a drafter that has an engine: what the engine holds of each, and who gives way where room is short.

Knows slots, pages, tokens and the nodes with KV. Does not know how trees grow, or what a step computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from distspec.drafters.base import DraftRow, check_row, common, limited
from distspec.drafters.sprout import Sprout
from distspec.engine import Engine
from distspec.errors import IllegalTransition, OutOfPages, OutOfSlots
from distspec.protocol.values import SamplingParams, Shape


@dataclass(slots=True)
class KeptText:
    """A committed text, and the tree below it.

    pending: its last tokens, whose KV is not computed; none once the end of the text was expanded. computed: nodes
    with KV, which are those that were expanded; the engine knows them by the same ids. slot: None where the engine
    holds nothing of it. steps: how many more this turn is to grow, as `shape` says. is_lent: somebody else computes it.
    """

    tokens: list[int] = field(default_factory=list)
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=1))
    slot: int | None = None
    pending: deque[int] = field(default_factory=deque)
    tree: Sprout = field(default_factory=Sprout)
    computed: set[int] = field(default_factory=set)
    shape: Shape = field(default_factory=lambda: Shape(steps=0))
    steps: int = 0
    is_lent: bool = False


class KeptTexts:
    """When slots or pages run out, the texts drafted for least recently give theirs up; they are computed again, or
    found in the prefix cache, when their turn comes.

    max_model_len: tokens of a text with its deepest node, at most. by_request: least recently used first. busy, below:
    texts that give nothing up.
    """

    def __init__(self, engine: Engine, max_model_len: int) -> None:
        self._engine = engine
        self._max_model_len = max_model_len
        self.by_request: dict[int, KeptText] = {}

    def turned(self, rows: Sequence[DraftRow]) -> list[KeptText]:
        """The texts as their rows say. Raises IllegalTransition, with nothing changed, for a row that keeps more than
        there is, or of a text that is lent."""
        for row in rows:
            known = self.by_request.get(row.request)
            check_row(row, len(known.tokens) if known else 0)
            if known is not None and known.is_lent:
                raise IllegalTransition(f"request {row.request}: its slot is lent")
        texts = [self._touch(row.request) for row in rows]
        for text, row in zip(texts, rows, strict=True):
            self._turn(text, row, texts)
        return texts

    def forget(self, request: int) -> None:
        text = self.by_request.pop(request, None)
        if text is not None and not text.is_lent:
            self._close(text)

    def fell(self, text: KeptText, busy: Sequence[KeptText]) -> None:
        """Drop the tree. Where the end of the text was expanded, its KV is among what others may share: begin anew."""
        if text.slot is not None and not text.pending:
            self._close(text)
            self._open(text, busy)
        elif text.slot is not None:
            text.tree.clear()
            self._engine.commit(text.slot, (), sorted(text.computed))
            text.computed.clear()

    def reserve(self, text: KeptText, positions: int, busy: Sequence[KeptText], is_idle: bool) -> bool:
        """Pages for so many positions more; a text that gets none, even with the idle ones closed, is closed itself, if
        nothing is under way."""
        assert text.slot is not None
        while True:
            try:
                self._engine.reserve(text.slot, positions)
                return True
            except OutOfPages:
                if not self._evict(busy):
                    if is_idle:
                        self._close(text)
                    return False

    def lend(self, request: int, text: KeptText) -> KeptLoan | None:
        """None for a text without a slot."""
        if text.slot is None:
            return None
        text.is_lent = True
        return KeptLoan(self, request, text, text.slot)

    # -- loans ---------------------------------------------------------------------------------

    def hold(self, text: KeptText, end: int) -> bool:
        """See Loan.hold."""
        assert text.slot is not None
        while end <= self._max_model_len:
            try:
                self._engine.reserve(text.slot, end - self._engine.sequence(text.slot).length)
                return True
            except OutOfPages:
                if not self._evict((text,)):
                    return False
        return False

    def follow(self, text: KeptText, tokens: Sequence[int], end: int) -> None:
        """See Loan.follow."""
        assert text.slot is not None
        sequence = self._engine.sequence(text.slot)
        text.tokens += tokens
        sequence.append(text.tokens[sequence.length : len(text.tokens) - 2])
        sequence.trim(max(0, end - sequence.length))
        text.pending = deque(text.tokens[sequence.length :])

    def give_back(self, request: int, text: KeptText) -> None:
        """See Loan.close."""
        text.is_lent = False
        if self.by_request.get(request) is not text:
            self._close(text)
        elif text.slot is not None:
            self._engine.sequence(text.slot).trim()

    # -- slots ---------------------------------------------------------------------------------

    def _touch(self, request: int) -> KeptText:
        text = self.by_request.pop(request, None) or KeptText()
        self.by_request[request] = text
        return text

    def _turn(self, text: KeptText, row: DraftRow, busy: Sequence[KeptText]) -> None:
        """Make the text what the row says; keep what was computed as far as it still holds."""
        known = len(text.tokens)
        same = row.keep + common(text.tokens[row.keep :], row.tokens)
        tail = row.tokens[known - row.keep :]
        del text.tokens[row.keep :]
        text.tokens += row.tokens
        text.params = row.params
        text.shape, text.steps = limited(row.shape, self._max_model_len - len(text.tokens)), row.shape.steps
        if text.slot is not None and same == known and len(text.tokens) <= self._max_model_len:
            self._advance(text, tail)
        else:
            self._close(text)
            self._open(text, busy)

    def _advance(self, text: KeptText, tail: tuple[int, ...]) -> None:
        """The text grew by `tail`: commit the nodes that it followed, drop what it left behind."""
        assert text.slot is not None
        kept, gone = text.tree.advance(tail)
        done = [node for node in kept if node in text.computed]
        self._engine.commit(text.slot, done, [node for node in gone if node in text.computed])
        text.computed.difference_update(kept, gone)
        text.pending.extend(tail[len(done) :])

    def _open(self, text: KeptText, busy: Sequence[KeptText]) -> None:
        """Take a slot; without one, or past the model's length, this text gets no drafts."""
        if not text.tokens or len(text.tokens) > self._max_model_len:
            return
        while text.slot is None:
            try:
                text.slot = self._engine.open(text.tokens, text.params)
            except OutOfSlots:
                if not self._evict(busy):
                    return
        text.pending.extend(text.tokens[self._engine.sequence(text.slot).length :])

    def _close(self, text: KeptText) -> None:
        if text.slot is not None:
            self._engine.close(text.slot)
        text.slot = None
        text.pending.clear()
        text.tree.clear()
        text.computed.clear()

    def _evict(self, busy: Sequence[KeptText]) -> bool:
        """Close the least recently used text that is not busy. Its tokens stay, so it can be opened again."""
        for text in self.by_request.values():
            if text.slot is not None and not text.is_lent and not any(text is other for other in busy):
                self._close(text)
                return True
        return False


@dataclass(frozen=True, slots=True)
class KeptLoan:
    """See Loan. Idle texts give way to what it holds, and no others."""

    _texts: KeptTexts
    _request: int
    _text: KeptText
    slot: int

    def hold(self, end: int) -> bool:
        return self._texts.hold(self._text, end)

    def follow(self, tokens: Sequence[int], end: int) -> None:
        self._texts.follow(self._text, tokens, end)

    def close(self) -> None:
        self._texts.give_back(self._request, self._text)
