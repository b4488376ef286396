"""The prefix cache: which pages hold the KV of which token prefixes, least recently used leave first.

Knows tokens and page numbers. Does not know sequences, tensors or requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from distspec.kv.pages import PageAllocator


class _Entry:
    """One cached page; the path from the root spells the tokens before it."""

    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, page: int, key: tuple[int, ...], parent: _Entry | None) -> None:
        self.page = page
        self.key = key
        self.parent = parent
        self.children: dict[tuple[int, ...], _Entry] = {}


class PrefixCache:
    """A radix tree over whole pages (as SGLang's RadixAttention, arXiv 2312.07104, at page granularity).

    The cache holds one reference of each of its pages. Entries stand in the order of their last use, every
    entry after all entries below it: an access moves a whole path to the end, deepest first. So the order in
    which pages leave is the order they stand in, and a child always comes before its parent.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._root = _Entry(-1, (), None)
        self._by_use: OrderedDict[_Entry, None] = OrderedDict()

    @property
    def held(self) -> int:
        """Pages the cache references."""
        return len(self._by_use)

    @property
    def pages(self) -> Iterator[int]:
        """The pages the cache references, least recently used first."""
        return (entry.page for entry in self._by_use)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Pages of the longest cached prefix of `tokens`, whole pages only; one reference each for the caller."""
        path = self._walk(tokens)
        self._touch(path)
        pages = [entry.page for entry in path]
        self._allocator.share(pages)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Cache `pages`, which hold the KV of `tokens`: whole pages only.

        Takes its own reference of each page it stores. Where the same tokens are cached already, the page
        there stays and the caller's is not stored. Raises ValueError if lengths do not agree.
        """
        size = self._allocator.page_size
        if len(tokens) != len(pages) * size:
            raise ValueError(f"{len(pages)} pages of {size} positions cannot hold {len(tokens)} tokens exactly")
        path = self._walk(tokens)
        entry = path[-1] if path else self._root
        for index in range(len(path), len(pages)):
            key = tuple(tokens[index * size : (index + 1) * size])
            child = _Entry(pages[index], key, entry)
            self._allocator.share((child.page,))
            entry.children[key] = child
            path.append(child)
            entry = child
        self._touch(path)

    def evict(self, count: int) -> int:
        """Free up to `count` pages that only the cache holds, least recently used first; returns how many."""
        leaving: list[_Entry] = []
        for entry in self._by_use:
            if len(leaving) >= count:
                break
            if not entry.children and self._allocator.references(entry.page) == 1:
                assert entry.parent is not None
                del entry.parent.children[entry.key]
                leaving.append(entry)
        for entry in leaving:
            del self._by_use[entry]
        self._allocator.release(entry.page for entry in leaving)
        return len(leaving)

    def _walk(self, tokens: Sequence[int]) -> list[_Entry]:
        size = self._allocator.page_size
        path: list[_Entry] = []
        entry = self._root
        for start in range(0, len(tokens) - size + 1, size):
            child = entry.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            path.append(child)
            entry = child
        return path

    def _touch(self, path: list[_Entry]) -> None:
        for entry in reversed(path):
            self._by_use[entry] = None
            self._by_use.move_to_end(entry)
