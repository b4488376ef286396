"""Which worker already holds a prefix: a small index of block hashes, and the choice it leads to.

Knows tokens that were sent to workers. Does not know their page tables: a wrong guess costs time, never tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class PrefixIndex:
    """Per worker, the hashes of whole blocks of `block` tokens that it has seen, least recently used out first."""

    def __init__(self, block: int = 64, blocks_per_worker: int = 4096) -> None:
        self._block, self._limit = block, blocks_per_worker
        self._seen: dict[str, OrderedDict[int, None]] = {}

    def note(self, worker: str, tokens: Sequence[int]) -> None:
        """This worker has computed these tokens."""
        seen = self._seen.setdefault(worker, OrderedDict())
        for digest in self._digests(tokens):
            seen[digest] = None
            seen.move_to_end(digest)
        while len(seen) > self._limit:
            seen.popitem(last=False)

    def matched(self, worker: str, tokens: Sequence[int]) -> int:
        """Tokens of the longest prefix, in whole blocks, that this worker has seen."""
        seen, blocks = self._seen.get(worker, OrderedDict()), 0
        for digest in self._digests(tokens):
            if digest not in seen:
                break
            blocks += 1
        return blocks * self._block

    def forget(self, worker: str) -> None:
        self._seen.pop(worker, None)

    def _digests(self, tokens: Sequence[int]) -> Iterator[int]:
        digest = 0
        for start in range(0, len(tokens) - self._block + 1, self._block):
            digest = hash((digest, tuple(tokens[start : start + self._block])))
            yield digest
