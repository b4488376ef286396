"""The drafter that fills in a whole block of tokens in one forward: DFlash.

Knows blocks, and the keys and values that the text's features make for them. Does not know the target, or which of its
nodes were judged.

Its tree is as deep as the block: the best token of each place below that of the place before, and beside it the next
best ones, which every place gives independently of the others. Each turn whose text has grown draws a whole new block.
Guesses are ranked with the noise that the target will use (arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence

from distspec.attention import Span
from distspec.drafters.features import FeatureDrafter, Path, Text
from distspec.engine import Guesses
from distspec.models.dflash import Dflash
from distspec.protocol.values import ROOT, Node


class DflashDrafter(FeatureDrafter[Dflash]):
    """See Drafter and FeatureDrafter. However many steps a shape says, a text gets one block of them.

    options.max_num_batched_tokens bounds a forward, but for a single block, whose rows are scratch.
    """

    kept = 1

    def _extend_context(self, text: Text) -> None:
        """Keys and values of the rows that the text has gained."""
        assert text.sequence is not None
        indices = range(text.right, text.sequence.length)
        where, positions = self.integers(self.locations(text.sequence, indices)), self.integers(list(indices))
        entered = self.vectors().index_select(0, where)
        for layer, (keys, values) in enumerate(self.pool.layers):
            k, v = self._model.context(layer, entered, positions)
            keys.index_copy_(0, where, k)
            values.index_copy_(0, where, v)
        text.right = text.sequence.length

    def _grow(self, texts: Sequence[Text]) -> bool:
        due = [text for text in texts if text.steps and self._is_due(text)]
        at_once = max(1, self.budget // self._model.settings.block_size)
        for i in range(0, len(due), at_once):
            some = [text for text in due[i : i + at_once] if self.hold(text, self._rows(text), texts)]
            for text in some:
                self._extend_context(text)
            if some:
                self._blocks(some)
        return True

    def _is_due(self, text: Text) -> bool:
        return text.sequence is not None and text.right < text.sequence.length and bool(text.shape.depth)

    def _rows(self, text: Text) -> int:
        """Of a block, as far as there are positions."""
        assert text.sequence is not None
        return min(self._model.settings.block_size, self._model.config.max_position - text.sequence.length)

    def _blocks(self, texts: Sequence[Text]) -> None:
        """One forward over the blocks of texts, each the last token and masks after it; all trees are new."""
        tokens: list[int] = []
        positions: list[int] = []
        spans = []
        for text in texts:
            sequence, count = text.sequence, self._rows(text)
            assert sequence is not None
            indices = sequence.add(Node(id=i, parent=ROOT, token=self._model.settings.mask_token) for i in range(count))
            tokens += [text.tokens[-1], *[self._model.settings.mask_token] * (count - 1)]
            positions += range(sequence.length, sequence.length + count)
            writes = self.locations(sequence, indices)
            spans.append(Span(sequence.pages, sequence.length, 0, (indices,) * count, writes))  # each row sees all
        hidden = self._model.forward(self.integers(tokens), self.integers(positions), self.attend(spans))
        of = [text for text, span in zip(texts, spans, strict=True) for _ in range(span.rows)]
        paths: list[Path] = [()] * len(of)  # places are guessed at once: none knows the ones before it
        guesses = iter(self.guesses(self._model.logits(hidden), of, paths, positions))
        for text, span in zip(texts, spans, strict=True):
            block = [next(guesses) for _ in range(span.rows)]
            _plant(text, block[1:])  # the first row is the last token's


def _plant(text: Text, block: Sequence[Guesses]) -> None:
    """Make the tree of a block: guesses of each place after the end of the text."""
    assert text.sequence is not None
    text.sequence.drop(list(text.sequence.nodes))
    text.tree.clear()
    node, stop = ROOT, text.params.stop_token_ids
    for guesses in block[: text.shape.depth]:
        children = text.tree.expand(node, guesses.ranked, text.shape, stop, guesses.law)
        if not children or text.tree.token(children[0]) in stop:
            break
        node = children[0]
