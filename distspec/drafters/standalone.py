"""A smaller causal model as drafter: it continues each sequence by a chain of its own draws.

Knows its own engine and what it computed ahead of each sequence. Does not know the target, or which of its
tokens were accepted: it sees that in what the sequences become.

Each token is drawn with the noise that the target will use at that position (drafter-invariant coupling,
arXiv 2408.07978), so that the two agree as often as their distributions allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from distspec.drafters.base import DraftRow, Proposal, check_row, until_stop
from distspec.engine import Engine, Outcome, Segment
from distspec.errors import OutOfPages, OutOfSlots
from distspec.protocol.messages import ROOT, Node, SamplingParams


@dataclass(slots=True)
class _Text:
    """A sequence, and what was drafted below its end.

    tokens: the sequence; its last ones are `pending` until their KV is computed. ahead: the chain drafted
    below it. nodes: ids of the computed ones among those, which are all but the last. slot: None where the
    engine holds nothing of it. need: drafted tokens that this turn is after.
    """

    tokens: list[int] = field(default_factory=list)
    params: SamplingParams | None = None
    slot: int | None = None
    pending: deque[int] = field(default_factory=deque)
    ahead: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    need: int = 0

    @property
    def waits(self) -> bool:
        """There is more to compute in this turn."""
        if self.slot is None:
            return False
        ended = bool(self.ahead) and self.params is not None and self.ahead[-1] in self.params.stop_token_ids
        return bool(self.pending) or (len(self.ahead) < self.need and not ended)


class StandaloneDrafter:
    """max_model_len: of the target. max_num_batched_tokens bounds a step of the drafter's engine.

    Its vocabulary must be the target's. When slots or pages run out, the sequences drafted for least recently
    give theirs up; they are computed again, or found in the prefix cache, when their turn comes.
    """

    def __init__(self, engine: Engine, *, max_num_batched_tokens: int, max_model_len: int) -> None:
        self._engine = engine
        self._budget = max_num_batched_tokens
        self._max_model_len = min(max_model_len, engine.max_model_len)
        self._texts: dict[int, _Text] = {}  # least recently used first
        self._ids = count()

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        for row in rows:
            known = self._texts.get(row.request)
            check_row(row, len(known.tokens) if known else 0)
        texts = [self._touch(row.request) for row in rows]
        for text, row in zip(texts, rows, strict=True):
            self._turn(text, row, texts)
        while any(text.waits for text in texts):
            self._step(texts)
        return [
            Proposal.chain(until_stop(text.ahead[: text.need], row.params))
            for text, row in zip(texts, rows, strict=True)
        ]

    def forget(self, request: int) -> None:
        text = self._texts.pop(request, None)
        if text is not None:
            self._close(text)

    def check(self) -> None:
        """Prove that every page has exactly its holders. Raises AssertionError."""
        self._engine.check()

    def _touch(self, request: int) -> _Text:
        text = self._texts.pop(request, None) or _Text()
        self._texts[request] = text
        return text

    def _turn(self, text: _Text, row: DraftRow, busy: Sequence[_Text]) -> None:
        """Make the text what the row says; keep what was computed as far as it still holds."""
        committed = len(text.tokens)
        same = row.keep + _common(text.tokens[row.keep :], row.tokens)
        tail = row.tokens[committed - row.keep :]
        del text.tokens[row.keep :]
        text.tokens += row.tokens
        text.params = row.params
        text.need = max(0, min(row.count, self._max_model_len - len(text.tokens)))
        if text.slot is not None and same == committed and len(text.tokens) <= self._max_model_len:
            self._advance(text, tail)
        else:
            self._close(text)
            self._open(text, busy)

    def _advance(self, text: _Text, tail: tuple[int, ...]) -> None:
        """The sequence grew by `tail`: commit the drafted nodes that it followed, drop what it did not."""
        assert text.slot is not None
        hit = _common(text.ahead[: len(text.nodes)], tail)
        text.pending.extend(tail[hit:])
        dead = text.nodes[hit:] if text.pending else []
        self._engine.commit(text.slot, text.nodes[:hit], dead)
        text.nodes = [] if text.pending else text.nodes[hit:]
        text.ahead = [] if text.pending else text.ahead[hit:]

    def _open(self, text: _Text, busy: Sequence[_Text]) -> None:
        """Take a slot; without one, or past the model's length, this sequence gets no drafts."""
        if not text.tokens or len(text.tokens) > self._max_model_len or text.params is None:
            return
        while text.slot is None:
            try:
                text.slot = self._engine.open(text.tokens, text.params)
            except OutOfSlots:
                if not self._evict(busy):
                    return
        text.pending.extend(text.tokens[self._engine.sequence(text.slot).length :])

    def _close(self, text: _Text) -> None:
        if text.slot is not None:
            self._engine.close(text.slot)
        text.slot = None
        text.pending.clear()
        text.ahead, text.nodes = [], []

    def _evict(self, busy: Sequence[_Text]) -> bool:
        """Close the least recently used text that is not busy. Its tokens stay, so it can be opened again."""
        for text in self._texts.values():
            if text.slot is not None and not any(text is other for other in busy):
                self._close(text)
                return True
        return False

    def _step(self, texts: Sequence[_Text]) -> None:
        """One step of the engine: a chunk of each text that is behind, a node of each that is not."""
        left = self._budget
        rows: list[tuple[_Text, Segment]] = []
        for text in texts:
            if text.waits and left:
                segment = self._segment(text, left)
                if self._reserve(text, len(segment.tokens) + len(segment.nodes), texts):
                    rows.append((text, segment))
                    left -= len(segment.tokens) + len(segment.nodes)
        if rows:
            for (text, segment), outcome in zip(rows, self._engine.step([s for _, s in rows]), strict=True):
                self._absorb(text, segment, outcome)

    def _segment(self, text: _Text, most: int) -> Segment:
        assert text.slot is not None
        if text.pending:
            tokens = tuple(text.pending)[:most]
            return Segment(slot=text.slot, tokens=tokens, want=len(tokens) == len(text.pending))
        parent = text.nodes[-1] if text.nodes else ROOT
        return Segment(
            slot=text.slot, tokens=(), nodes=(Node(id=next(self._ids), parent=parent, token=text.ahead[-1]),)
        )

    def _reserve(self, text: _Text, positions: int, busy: Sequence[_Text]) -> bool:
        """Pages for a segment; a text that gets none, even with the idle ones closed, is closed itself."""
        assert text.slot is not None
        while True:
            try:
                self._engine.reserve(text.slot, positions)
                return True
            except OutOfPages:
                if not self._evict(busy):
                    self._close(text)
                    return False

    def _absorb(self, text: _Text, segment: Segment, outcome: Outcome) -> None:
        for _ in segment.tokens:
            text.pending.popleft()
        text.nodes += [node.id for node in segment.nodes]
        text.ahead += outcome.nodes or ([outcome.root] if outcome.root is not None else [])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
