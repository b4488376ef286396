"""What a simulated target worker computes with: real books of KV pages, over a memory that holds tokens.

An outcome is computed from what the memory holds at the pages that the books name, so it is wrong, or an
error, wherever the path of a node was never computed, was moved or was overwritten. Knows tokens, positions
and pages. Does not know messages or requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from distspec.kv.pages import PageAllocator
from distspec.kv.radix import PrefixCache
from distspec.kv.sequence import Books, Sequence
from distspec.protocol.values import ROOT, Node, SamplingParams, TokenLogprobs
from distspec.sim.model import ToyModel
from distspec.sim.violation import Violation

Cell = tuple[int, int]
"""A token and its position: what stands for the KV of one position."""

Judged = tuple[int, int, TokenLogprobs]
"""A node id or ROOT, what the model draws after it, and what it says of that."""


class Memory:
    """room: most scratch nodes of a sequence. max_model_len: most tokens of a path."""

    def __init__(self, model: ToyModel, *, pages: int, page_size: int, room: int, max_model_len: int) -> None:
        self._model, self._room, self._longest = model, room, max_model_len
        allocator = PageAllocator(pages, page_size)
        self.books = Books(allocator, PrefixCache(allocator))
        self._cells: list[Cell] = [(-1, -1)] * (pages * page_size)

    def decide(self, sequence: Sequence, commit: Seq[int], drop: Iterable[int]) -> None:
        """Commit and drop nodes, and move cells as the books say."""
        moves = sequence.commit(commit, drop)
        cells = [self._cells[sequence.location(source)] for source, _ in moves]
        for (_, to), cell in zip(moves, cells, strict=True):
            self._cells[sequence.location(to)] = cell

    def compute(self, sequence: Sequence, tokens: Seq[int], nodes: Seq[Node], params: SamplingParams) -> list[Judged]:
        """Append tokens and add nodes; the outcomes after the last token (if there is one) and after each node."""
        self._write(sequence, sequence.append(tokens), tokens, range(sequence.length - len(tokens), sequence.length))
        indices = sequence.add(nodes)
        self._write(sequence, indices, [n.token for n in nodes], [sequence.position(n.id) for n in nodes])
        if len(sequence.nodes) > self._room:
            raise Violation(f"{len(sequence.nodes)} live nodes, room for {self._room}")
        longest = max([sequence.length, *(sequence.position(n.id) + 1 for n in nodes)])
        if longest > self._longest:
            raise Violation(f"a path of {longest} tokens, max_model_len is {self._longest}")
        committed = list(range(sequence.length))
        out = [(ROOT, *self._outcome(sequence, committed, params))] if tokens else []
        return out + [
            (node.id, *self._outcome(sequence, committed + sequence.ancestors(node.id), params)) for node in nodes
        ]

    def read(self, sequence: Sequence, length: int) -> list[Cell]:
        """The cells of the first `length` committed positions."""
        return [self._cells[sequence.location(i)] for i in range(length)]

    def features(self, sequence: Sequence, start: int, length: int, nodes: Seq[int]) -> list[Cell]:
        """The cells of positions start .. start+length-1; `nodes`: as SendFeatures has them."""
        known = {start + length - len(nodes) + i: node for i, node in enumerate(nodes)}
        out = []
        for position in range(start, start + length):
            index = position
            if position >= sequence.length:
                if known.get(position) not in sequence.nodes:
                    raise Violation(
                        f"features of position {position} wanted, {sequence.length} committed, no such node"
                    )
                index = sequence.ancestors(known[position])[0]
            out.append(self._cells[sequence.location(index)])
        return out

    def load(self, sequence: Sequence, cells: Seq[Cell]) -> None:
        """Cells of somebody else's memory, for the first committed positions."""
        for i, cell in enumerate(cells):
            self._cells[sequence.location(i)] = cell

    def _write(self, sequence: Sequence, indices: Seq[int], tokens: Seq[int], positions: Seq[int]) -> None:
        for index, token, position in zip(indices, tokens, positions, strict=True):
            self._cells[sequence.location(index)] = token, position

    def _outcome(self, sequence: Sequence, seen: Seq[int], params: SamplingParams) -> tuple[int, TokenLogprobs]:
        """What the model draws, and says of it, after the cells it attends to, which must be one gap-free text."""
        cells = sorted((self._cells[sequence.location(i)] for i in seen), key=lambda cell: cell[1])
        if [position for _, position in cells] != list(range(len(cells))):
            raise Violation(f"attends to positions {[position for _, position in cells]}")
        text = [token for token, _ in cells]
        return self._model.outcome(text, params), self._model.logprobs(text, params)
