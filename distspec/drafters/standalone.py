"""A smaller causal model as drafter: it grows a tree below each text from its own draws.

Knows its own engine and what it computed below each text. Does not know the target, or which of its nodes were
judged: it sees in what the texts become which of them were accepted, and keeps the subtree that survives, KV and all.

Guesses are ranked with the noise that the target will use at that position (drafter-invariant coupling,
arXiv 2408.07978), so that the two agree as often as their distributions allow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from distspec.drafters.base import Called, DraftRow, Loan, Proposal, check_row, common, limited, never
from distspec.drafters.sprout import Sprout
from distspec.engine import Engine, Guesses, Guessing, Outcome, Segment
from distspec.errors import IllegalTransition, OutOfPages, OutOfSlots
from distspec.kv.pool import KVPool
from distspec.protocol.values import ROOT, Node, SamplingParams, Shape

_NO_TREE = Shape(steps=0)


@dataclass(slots=True)
class _Text:
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


@dataclass(slots=True)
class _Part:
    """Of a step, for one text. is_void: what comes of it is not wanted any more."""

    text: _Text
    segment: Segment
    is_void: bool = False

    @property
    def wanted(self) -> list[int]:
        """The nodes that get guesses."""
        root = [ROOT] if self.segment.tokens and self.segment.want else []
        return root + [node.id for node in self.segment.nodes]

    def is_foreseen(self, guesses: Sequence[Guesses]) -> bool:
        """As many guesses as there are children, and no stop token where something was computed below."""
        text = self.text
        stop, computed, children = text.params.stop_token_ids, text.computed, text.tree.children
        return all(
            len(guess.ranked) >= len(children(node))
            and not any(
                token in stop and child in computed
                for child, (token, _) in zip(children(node), guess.ranked, strict=False)
            )
            for node, guess in zip(self.wanted, guesses, strict=True)
        )


@dataclass(slots=True)
class _Step:
    """Of the engine, under way. ahead: its nodes have their children, whose tokens it will tell."""

    parts: list[_Part]
    guessing: Guessing
    ahead: bool
    _found: list[Outcome[Guesses]] | None = None

    def found(self) -> list[tuple[_Part, list[Guesses]]]:
        """Waits. What may follow each wanted node."""
        if self._found is None:
            self._found = self.guessing.read()
        return [
            (part, [*([] if outcome.root is None else [outcome.root]), *outcome.nodes])
            for part, outcome in zip(self.parts, self._found, strict=True)
        ]


class StandaloneDrafter:
    """max_model_len: of the target. max_num_batched_tokens bounds a step of the drafter's engine, max_scratch_nodes
    the nodes with KV of a text. is_called: a turn ends early then, when what was launched is through.

    Its vocabulary must be the target's. When slots or pages run out, the texts drafted for least recently give
    theirs up; they are computed again, or found in the prefix cache, when their turn comes.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_num_batched_tokens: int,
        max_scratch_nodes: int,
        max_model_len: int,
        is_called: Called = never,
    ) -> None:
        self._engine = engine
        self._budget = max_num_batched_tokens
        self._room = max_scratch_nodes
        self._max_model_len = min(max_model_len, engine.max_model_len)
        self._is_called = is_called
        self._texts: dict[int, _Text] = {}  # least recently used first

    @property
    def lender(self) -> StandaloneDrafter:
        """It can lend its slots: see Lender."""
        return self

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def pool(self) -> KVPool:
        return self._engine.pool

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        texts = self._turned(rows)
        ahead = all(map(self._is_foreseeable, texts))
        step, goes_on = self._launch(texts, ahead), True
        while step is not None:
            later = self._launch(texts, ahead, step) if ahead and goes_on else None
            self._land(step, later)
            goes_on = goes_on and not self._is_called()
            step = later or (self._launch(texts, ahead) if goes_on else None)
        return [
            text.tree.proposal() if goes_on or not text.steps else Proposal((), (), left=text.steps) for text in texts
        ]

    def lend(self, rows: Sequence[DraftRow]) -> list[Loan | None]:
        texts = self._turned([replace(row, shape=_NO_TREE) for row in rows])
        for text in texts:
            self._fell(text, texts)
        while self._catch_up(texts):
            pass
        return [self._loan(row.request, text) for row, text in zip(rows, texts, strict=True)]

    def forget(self, request: int) -> None:
        text = self._texts.pop(request, None)
        if text is not None and not text.is_lent:
            self._close(text)

    def check(self) -> None:
        """Prove that every page has exactly its holders. Raises AssertionError."""
        self._engine.check()

    # -- texts ---------------------------------------------------------------------------------

    def _turned(self, rows: Sequence[DraftRow]) -> list[_Text]:
        for row in rows:
            known = self._texts.get(row.request)
            check_row(row, len(known.tokens) if known else 0)
            if known is not None and known.is_lent:
                raise IllegalTransition(f"request {row.request}: its slot is lent")
        texts = [self._touch(row.request) for row in rows]
        for text, row in zip(texts, rows, strict=True):
            self._turn(text, row, texts)
        return texts

    def _touch(self, request: int) -> _Text:
        text = self._texts.pop(request, None) or _Text()
        self._texts[request] = text
        return text

    def _turn(self, text: _Text, row: DraftRow, busy: Sequence[_Text]) -> None:
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

    def _advance(self, text: _Text, tail: tuple[int, ...]) -> None:
        """The text grew by `tail`: commit the nodes that it followed, drop what it left behind."""
        assert text.slot is not None
        kept, gone = text.tree.advance(tail)
        done = [node for node in kept if node in text.computed]
        self._engine.commit(text.slot, done, [node for node in gone if node in text.computed])
        text.computed.difference_update(kept, gone)
        text.pending.extend(tail[len(done) :])

    def _open(self, text: _Text, busy: Sequence[_Text]) -> None:
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

    def _close(self, text: _Text) -> None:
        if text.slot is not None:
            self._engine.close(text.slot)
        text.slot = None
        text.pending.clear()
        text.tree.clear()
        text.computed.clear()

    def _evict(self, busy: Sequence[_Text]) -> bool:
        """Close the least recently used text that is not busy. Its tokens stay, so it can be opened again."""
        for text in self._texts.values():
            if text.slot is not None and not text.is_lent and not any(text is other for other in busy):
                self._close(text)
                return True
        return False

    # -- loans ---------------------------------------------------------------------------------

    def _fell(self, text: _Text, busy: Sequence[_Text]) -> None:
        """Drop the tree. Where the end of the text was expanded, its KV is among what others may share: begin anew."""
        if text.slot is not None and not text.pending:
            self._close(text)
            self._open(text, busy)
        elif text.slot is not None:
            text.tree.clear()
            self._engine.commit(text.slot, (), sorted(text.computed))
            text.computed.clear()

    def _catch_up(self, texts: Sequence[_Text]) -> bool:
        """One step of the engine for the texts of which more than two tokens are not computed; False if none are."""
        left = self._budget
        rows: list[tuple[_Text, Segment]] = []
        for text in texts:
            tokens = tuple(text.pending)[:-1][:left] if text.slot is not None and len(text.pending) > 2 else ()
            if tokens and self._reserve(text, len(tokens), texts, is_idle=True):
                assert text.slot is not None
                rows.append((text, Segment(text.slot, tokens, want=False)))
                left -= len(tokens)
        self._engine.step([segment for _, segment in rows])
        for text, segment in rows:
            for _ in segment.tokens:
                text.pending.popleft()
        return bool(rows)

    def _loan(self, request: int, text: _Text) -> _Loan | None:
        if text.slot is None:
            return None
        text.is_lent = True
        return _Loan(self, request, text, text.slot)

    def _hold(self, text: _Text, end: int) -> bool:
        assert text.slot is not None
        while end <= self._max_model_len:
            try:
                self._engine.reserve(text.slot, end - self._engine.sequence(text.slot).length)
                return True
            except OutOfPages:
                if not self._evict((text,)):
                    return False
        return False

    # -- steps ---------------------------------------------------------------------------------

    def _is_foreseeable(self, text: _Text) -> bool:
        """The odds alone say which nodes a step expands, whatever tokens they are."""
        edited = text.slot is not None and self._engine.is_edited(text.slot)
        return bool(text.shape.odds) and not edited and self._engine.is_coupled

    def _launch(self, texts: Sequence[_Text], ahead: bool, before: _Step | None = None) -> _Step | None:
        """Begin a step of the engine: a chunk of each text that is behind, the frontier of each that is not. None if
        nothing is left to do. ahead: give the nodes their children now, which get their tokens when the step lands.
        before: the step begun last, if it has not landed."""
        left = self._budget
        parts: list[_Part] = []
        for text in texts:
            segment = self._segment(text, left) if left else None
            if segment is not None and self._reserve(text, segment.rows, texts, is_idle=before is None):
                parts.append(_Part(text, segment))
                left -= segment.rows
        if not parts:
            return None
        most, segments = max(part.text.shape.topk for part in parts), [part.segment for part in parts]
        step = _Step(parts, self._engine.guess(segments, most, before.guessing if before is not None else None), ahead)
        self._book(step)
        return step

    def _book(self, step: _Step) -> None:
        """A step that is only a chunk of a prefill is none of the turn's."""
        for part in step.parts:
            for _ in part.segment.tokens:
                part.text.pending.popleft()
            part.text.computed.update(node.id for node in part.segment.nodes)
            part.text.steps -= bool(part.wanted)
        tokens = step.guessing.tokens
        if step.ahead and tokens is not None:
            wanted = ((part.text, node) for part in step.parts for node in part.wanted)
            for first, (text, node) in zip(range(0, tokens.numel(), tokens.shape[1]), wanted, strict=True):
                text.tree.expand(node, [(-1 - first - rank, 0.0) for rank in range(tokens.shape[1])], text.shape)

    def _land(self, step: _Step, later: _Step | None) -> None:
        """Hang the guesses into the trees, or say what was hung there in advance. What `later` computes of a text in
        which something came that nobody foresaw is taken back."""
        parts = [(part, guesses) for part, guesses in step.found() if not part.is_void]
        if not step.ahead:
            for part, guesses in parts:
                for node, guess in zip(part.wanted, guesses, strict=True):
                    stop = part.text.params.stop_token_ids
                    part.text.tree.expand(node, guess.ranked, part.text.shape, stop, guess.law)
            return
        for part, guesses in parts:
            self._name(part, guesses)
        void = [part.text for part, guesses in parts if not part.is_foreseen(guesses)] if later is not None else []
        if later is not None and void:
            later.found()
            for part in later.parts:
                if any(part.text is text for text in void):
                    self._take_back(part)
        for part, guesses in parts:
            for node, guess in zip(part.wanted, guesses, strict=True):
                part.text.tree.fill(node, guess.ranked, part.text.params.stop_token_ids)

    def _name(self, part: _Part, guesses: Sequence[Guesses]) -> None:
        """Tell the engine what the nodes are that were computed before anyone knew."""
        text = part.text
        sequence = self._engine.sequence(part.segment.slot)
        for node, guess in zip(part.wanted, guesses, strict=True):
            for child, (token, _) in zip(text.tree.children(node), guess.ranked, strict=False):
                if child in text.computed:
                    sequence.name(child, token)

    def _take_back(self, part: _Part) -> None:
        text, nodes = part.text, [node.id for node in part.segment.nodes]
        for node in nodes:
            text.tree.fold(node)
        text.computed.difference_update(nodes)
        self._engine.commit(part.segment.slot, (), nodes)
        text.steps += 1
        part.is_void = True

    def _segment(self, text: _Text, most: int) -> Segment | None:
        """What this text computes next, in at most so many rows; None if its turn is over, or must wait for a step
        with room for a whole frontier."""
        if text.slot is None or not text.steps or not self._engine.is_ready(text.slot):
            return None
        frontier = text.tree.frontier(text.shape)
        if not frontier:
            return None
        if text.pending:
            tokens = tuple(text.pending)[:most]
            return Segment(text.slot, tokens, want=len(tokens) == len(text.pending))
        frontier = frontier[: max(0, min(self._budget, self._room - len(text.computed)))]
        if not 0 < len(frontier) <= most:
            return None
        nodes = (Node(id=node, parent=text.tree.parent(node), token=text.tree.token(node)) for node in frontier)
        return Segment(text.slot, (), tuple(nodes))

    def _reserve(self, text: _Text, positions: int, busy: Sequence[_Text], is_idle: bool) -> bool:
        """Pages for a segment; a text that gets none, even with the idle ones closed, is closed itself, if nothing is
        under way."""
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


@dataclass(slots=True)
class _Loan:
    """See Loan. Idle texts give way to what it holds, and no others."""

    _drafter: StandaloneDrafter
    _request: int
    _text: _Text
    slot: int

    def hold(self, end: int) -> bool:
        return self._drafter._hold(self._text, end)

    def follow(self, tokens: Sequence[int], end: int) -> None:
        text, sequence = self._text, self._drafter.engine.sequence(self.slot)
        text.tokens += tokens
        sequence.append(text.tokens[sequence.length : len(text.tokens) - 2])
        sequence.trim(max(0, end - sequence.length))
        text.pending = deque(text.tokens[sequence.length :])

    def close(self) -> None:
        self._text.is_lent = False
        if self._drafter._texts.get(self._request) is self._text:
            self._drafter.engine.sequence(self.slot).trim()
        else:
            self._drafter._close(self._text)
