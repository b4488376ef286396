"""A smaller causal model as drafter: it grows a tree below each text from its own draws.

Knows its own engine, and what of each text and its tree is to be computed next. Does not know the target, or which of
its nodes were judged: it sees in what the texts become which of them were accepted, and keeps the subtree that
survives, KV and all (kept.py).

Guesses are ranked with the noise that the target will use at that position (drafter-invariant coupling,
arXiv 2408.07978), so that the two agree as often as their distributions allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distspec.drafters.base import Called, DraftRow, Loan, Proposal, never
from distspec.drafters.kept import KeptText, KeptTexts
from distspec.engine import Engine, Guesses, Guessing, Outcome, Segment, stand_in
from distspec.kv.pool import KVPool
from distspec.protocol.values import ROOT, Node, Shape

_NO_TREE = Shape(steps=0)


@dataclass(slots=True)
class _Part:
    """Of a step, for one text. is_void: what comes of it is not wanted any more."""

    text: KeptText
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

    Its vocabulary must be the target's.
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
        self._kept = KeptTexts(engine, min(max_model_len, engine.max_model_len))
        self._is_called = is_called

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
        texts = self._kept.turned(rows)
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
        texts = self._kept.turned([replace(row, shape=_NO_TREE) for row in rows])
        for text in texts:
            self._kept.fell(text, texts)
        while self._catch_up(texts):
            pass
        return [self._kept.lend(row.request, text) for row, text in zip(rows, texts, strict=True)]

    def forget(self, request: int) -> None:
        self._kept.forget(request)

    def check(self) -> None:
        """Prove that every page has exactly its holders. Raises AssertionError."""
        self._engine.check()

    # -- steps ---------------------------------------------------------------------------------

    def _catch_up(self, texts: Sequence[KeptText]) -> bool:
        """One step of the engine for the texts of which more than two tokens are not computed; False if none are."""
        left = self._budget
        rows: list[tuple[KeptText, Segment]] = []
        for text in texts:
            tokens = tuple(text.pending)[:-1][:left] if text.slot is not None and len(text.pending) > 2 else ()
            if tokens and self._kept.reserve(text, len(tokens), texts, is_idle=True):
                assert text.slot is not None
                rows.append((text, Segment(text.slot, tokens, want=False)))
                left -= len(tokens)
        self._engine.step([segment for _, segment in rows])
        for text, segment in rows:
            for _ in segment.tokens:
                text.pending.popleft()
        return bool(rows)

    def _is_foreseeable(self, text: KeptText) -> bool:
        """The odds alone say which nodes a step expands, whatever tokens they are."""
        edited = text.slot is not None and self._engine.is_edited(text.slot)
        return bool(text.shape.odds) and not edited and self._engine.is_coupled

    def _launch(self, texts: Sequence[KeptText], ahead: bool, before: _Step | None = None) -> _Step | None:
        """Begin a step of the engine: a chunk of each text that is behind, the frontier of each that is not. None if
        nothing is left to do. ahead: give the nodes their children now, which get their tokens when the step lands.
        before: the step begun last, if it has not landed."""
        left = self._budget
        parts: list[_Part] = []
        for text in texts:
            segment = self._segment(text, left) if left else None
            if segment is not None and self._kept.reserve(text, segment.rows, texts, is_idle=before is None):
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
                text.tree.expand(node, [(stand_in(first + rank), 0.0) for rank in range(tokens.shape[1])], text.shape)

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

    def _segment(self, text: KeptText, most: int) -> Segment | None:
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
