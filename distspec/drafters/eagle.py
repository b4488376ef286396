"""Drafters of one layer that is fed with tokens and features: EAGLE, EAGLE-2, EAGLE-3, MTP.

Knows how a tree grows from the layer's own hidden states. Does not know which of these models it has, the target, or
which of its nodes were judged.

A node's row reads the hidden state of its parent's row, where a row of the text reads the target's feature. When nodes
become text their rows are computed again from the target's features, as EAGLE does (arXiv 2401.15077), and what hangs
below them stays as it is. Guesses are ranked with the noise that the target will use (arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from distspec.attention import Span
from distspec.drafters.features import FeatureDrafter, Path, Text
from distspec.engine import Guesses, Outcome
from distspec.models import FeatureModel
from distspec.protocol.values import ROOT, Node

_ENTERED, _LEFT = 0, 1
"""What is kept of a row: the feature that entered, and the hidden state that left, the feature of the rows below."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one text: committed ones start .. stop-1, or nodes. want: guesses after the last committed one."""

    text: Text
    start: int
    stop: int
    nodes: tuple[int, ...] = ()
    want: bool = False

    @property
    def rows(self) -> int:
        return self.stop - self.start + len(self.nodes)


@dataclass(slots=True)
class _Batch:
    """The rows of a step. sources: entries of `vectors` that rows are fed with; writes: their locations; wanted: rows
    that are guessed after, with their texts, the paths below these, and the absolute positions of the tokens to be
    drawn."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def add(self, piece: _Piece) -> None:
        """Take over the rows of a piece, whose nodes are put into scratch."""
        text, sequence = piece.text, piece.text.sequence
        assert sequence is not None
        nodes = [Node(id=id, parent=text.tree.parent(id), token=text.tree.token(id)) for id in piece.nodes]
        committed = range(piece.start, piece.stop)
        writes = [sequence.location(index) for index in [*committed, *sequence.add(nodes)]]
        seen = [sequence.ancestors(node.id) for node in nodes]
        above = [path[1] if len(path) > 1 else sequence.length - 1 for path in seen]
        self.sources += [2 * location + _ENTERED for location in writes[: len(committed)]]
        self.sources += [2 * sequence.location(index) + _LEFT for index in above]
        first = len(self.tokens) + len(committed)
        wanted = range(first - piece.want, first + len(nodes))
        self.tokens += [*sequence.tokens[piece.start : piece.stop], *(node.token for node in nodes)]
        self.positions += [*committed, *(sequence.position(node.id) for node in nodes)]
        self.writes += writes
        self.wanted += wanted
        self.texts += [text] * len(wanted)
        self.paths += [()] * piece.want + [sequence.path(node.id) for node in nodes]
        self.draws += [self.positions[row] + 2 for row in wanted]  # a row stands one position before its token
        length = sequence.length if nodes else piece.stop
        self.spans.append(Span(sequence.pages, length, len(committed), tuple(seen), writes))


class EagleDrafter(FeatureDrafter[FeatureModel]):
    """See Drafter and FeatureDrafter.

    options.max_num_batched_tokens bounds a step, max_scratch_nodes the nodes with KV of a text.
    """

    kept = 2

    def _grow(self, texts: Sequence[Text]) -> bool:
        while self._step(texts):
            if self._is_called():
                return False
        return True

    def _step(self, texts: Sequence[Text]) -> bool:
        """One forward: a chunk of each text that is behind, the frontier of each that is not. False if nothing is left
        to do."""
        left, pieces = self.budget, []
        for text in texts:
            piece = self._piece(text, left) if left else None
            if piece is not None and self.hold(text, len(piece.nodes), texts):
                pieces.append(piece)
                left -= piece.rows
        if not pieces:
            return False
        for piece, outcome in zip(pieces, self._run(pieces), strict=True):
            _absorb(piece, outcome)
        return True

    def _piece(self, text: Text, most: int) -> _Piece | None:
        """What this text computes next, in at most so many rows; None if its turn is over, or must wait for a step
        with room for a whole frontier."""
        frontier = text.tree.frontier(text.shape) if text.steps and text.sequence is not None else []
        if not frontier or text.sequence is None:
            return None
        end = text.sequence.length
        if text.right < end:
            stop = min(end, text.right + most)
            return _Piece(text, text.right, stop, want=stop == end and ROOT in frontier)
        frontier = frontier[: max(0, min(self.budget, self.room - len(text.computed)))]
        return _Piece(text, end, end, tuple(frontier)) if 0 < len(frontier) <= most else None

    def _run(self, pieces: Sequence[_Piece]) -> list[Outcome[Guesses]]:
        batch = _Batch()
        for piece in pieces:
            batch.add(piece)
        vectors = self.vectors()
        fed = vectors.index_select(0, self.integers(batch.sources))
        positions, attend = self.integers(batch.positions), self.attend(batch.spans)
        hidden = self._model.forward(self.integers(batch.tokens), fed, positions, attend)
        vectors.index_copy_(0, self.integers([2 * location + _LEFT for location in batch.writes]), hidden)
        guesses = iter(self._guesses(hidden, batch))
        return [
            Outcome(root=next(guesses) if piece.want else None, nodes=[next(guesses) for _ in piece.nodes])
            for piece in pieces
        ]

    def _guesses(self, hidden: Tensor, batch: _Batch) -> list[Guesses]:
        if not batch.wanted:
            return []
        logits = self._model.logits(hidden.index_select(0, self.integers(batch.wanted)))
        return self.guesses(logits, batch.texts, batch.paths, batch.draws)


def _absorb(piece: _Piece, outcome: Outcome[Guesses]) -> None:
    """Hang the guesses into the tree; a forward without any is none of the turn's steps."""
    text = piece.text
    text.right = max(text.right, piece.stop)
    text.computed.update(piece.nodes)
    found = dict(zip(piece.nodes, outcome.nodes, strict=True))
    if outcome.root is not None:
        found[ROOT] = outcome.root
    for node, guesses in found.items():
        text.tree.expand(node, guesses.ranked, text.shape, text.params.stop_token_ids, guesses.law)
    text.steps -= bool(found)
