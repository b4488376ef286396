"""The tree of a drafter by the book: paths of tokens in the order in which they were found; texts and shapes to try."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from hypothesis import strategies as st

from distspec.drafters.base import Proposal
from distspec.drafters.sprout import worth
from distspec.protocol.values import ROOT, Shape

Path = tuple[int, ...]

tokens = st.lists(st.integers(0, 3), max_size=12)
edits = st.lists(st.tuples(st.floats(0, 1), tokens), min_size=1, max_size=8)
shapes = st.builds(
    Shape,
    steps=st.integers(0, 4),
    topk=st.integers(1, 3),
    width=st.integers(1, 3),
    nodes=st.integers(1, 16),
    depth=st.integers(0, 6),
    odds=st.sampled_from([(), (0.8, 0.1), (0.6, 0.25, 0.1)]),
)
"""What drafters are asked for; and for those that look texts up: tokens of few kinds; of edits of a text, the share of
it that stays and what comes then."""


class Growth:
    """guess(path): (token, log-probability) of what may follow it, the best first; at least topk of them.

    found: rank and score of the last token of each path. expanded: paths that were given children, () the end of
    the text.
    """

    def __init__(self, guess: Callable[[Path], Sequence[tuple[int, float]]], stop: Collection[int] = ()) -> None:
        self._guess = guess
        self._stop = stop
        self.found: dict[Path, tuple[int, float]] = {}
        self.expanded: set[Path] = set()

    def follow(self, tokens: Sequence[int]) -> None:
        """The text grew: only paths that begin with what came are still true, and lose it."""
        came, cut = tuple(tokens), len(tokens)
        self.expanded = {path[cut:] for path in self.expanded if path[:cut] == came}
        self.found = {path[cut:]: of for path, of in self.found.items() if path[:cut] == came and len(path) > cut}

    def clear(self) -> None:
        self.found, self.expanded = {}, set()

    def frontier(self, shape: Shape) -> list[Path]:
        """The shape's `width` best paths without children; of equals, those that were found first."""
        ends = [path for path in ((), *self.found) if path not in self.expanded]
        ends = [path for path in ends if len(path) < shape.depth and not set(path) & set(self._stop)]
        return sorted(ends, key=lambda path: self._value(path, shape), reverse=True)[: shape.width]

    def grow(self, shape: Shape) -> list[Path]:
        """One step; the paths that got children."""
        grown = []
        for path in self.frontier(shape):
            if len(self.found) >= shape.nodes:
                break
            grown.append(path)
            for rank, (token, score) in enumerate(self._guess(path)[: shape.topk]):
                if len(self.found) < shape.nodes:
                    self.found[(*path, token)] = (rank, score)
        self.expanded.update(grown)
        return grown

    def proposal(self) -> Proposal:
        order = {path: i for i, path in enumerate(self.found)}
        return Proposal(
            tokens=tuple(path[-1] for path in order),
            parents=tuple(order.get(path[:-1], ROOT) for path in order),
            scores=tuple(score for _, score in self.found.values()),
        )

    def _value(self, path: Path, shape: Shape) -> float:
        value = 0.0
        for end in range(1, len(path) + 1):
            value += worth(*self.found[path[:end]], shape.odds)
        return value


def paths(proposal: Proposal) -> list[Path]:
    """The tokens from the top down to each node."""
    out: list[Path] = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        out.append((*(out[parent] if parent != ROOT else ()), token))
    return out
