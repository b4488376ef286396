"""A committed text as a drafter follows it, and the drafter's tree below its end.

Knows tokens and what outlives a commit. Does not know requests, or where guesses come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distspec.drafters.base import common
from distspec.drafters.sprout import Sprout


@dataclass(slots=True)
class Text:
    tokens: list[int] = field(default_factory=list)
    tree: Sprout = field(default_factory=Sprout)

    def follow(self, keep: int, tokens: Sequence[int]) -> int:
        """Cut to `keep` tokens and append; of the tree stays what the text followed, nothing where it was cut.

        Returns how many tokens at the start are as before.
        """
        known = len(self.tokens)
        same = keep + common(self.tokens[keep:], tokens)
        if same == known:
            self.tree.advance(tokens[known - keep :])
        else:
            self.tree.clear()
        del self.tokens[same:]
        self.tokens += tokens[same - keep :]
        return same
