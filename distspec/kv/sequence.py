"""The books of sequences: which pages a request holds, and which position or node lies where in them.

Knows pages, lengths, tokens and scratch nodes. Does not know tensors, models or slots: real and simulated
workers keep the same books, and whoever has tensors carries out the moves named here.

A sequence is an array of logical indices; index i lies at location pages[i // page_size] * page_size +
i % page_size of the pool. Committed tokens are 0 .. length-1 without a gap. Scratch nodes lie above, each at
the lowest free index when it was added, so an accepted chain is in place already and commits without a move.
A node's index says nothing about its position in the text: that is its depth in the tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

from distspec.errors import IllegalTransition
from distspec.kv.pages import PageAllocator
from distspec.kv.radix import PrefixCache
from distspec.protocol.values import ROOT, Node

Move = tuple[int, int]
"""(source, destination), logical indices. Moves of one list happen at once: gather all, then scatter."""


class Spots(NamedTuple):
    """Where logical indices that follow each other lie. offset: the first one's place in the first page."""

    pages: list[int]
    offset: int
    page_size: int

    def behind(self, positions: int) -> Spots:
        """Those of the same but for so many at the start."""
        at = self.offset + positions
        return Spots(self.pages[at // self.page_size :], at % self.page_size, self.page_size)


@dataclass(slots=True)
class _Live:
    """A scratch node. parent: id of its parent; for a child of the root, what names that root (`_root`)."""

    index: int
    parent: int
    position: int
    token: int


class Sequence:
    """KV of one request: committed tokens, then scratch nodes. Made by `Books.open`."""

    def __init__(self, books: Books, pages: list[int], tokens: list[int]) -> None:
        self.pages = pages
        self.tokens = tokens
        self._books = books
        self._live: dict[int, _Live] = {}
        self._root = _appended(len(tokens))
        self._above: dict[int, list[int]] = {}  # ancestors of nodes that hang on this root, as far as asked for

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.tokens)

    @property
    def nodes(self) -> Collection[int]:
        """Ids of the scratch nodes."""
        return self._live.keys()

    @property
    def room(self) -> int:
        """Positions reserved and not used."""
        return len(self.pages) * self._books.page_size - self.length - len(self._live)

    def reserve(self, positions: int) -> None:
        """Hold pages for `positions` tokens or nodes more than are there now.

        Evicts from the prefix cache when short. Raises OutOfPages; the sequence is then as before.
        """
        pages = -(-(positions - self.room) // self._books.page_size)
        if pages > 0:
            self.pages += self._books.allocate(pages)

    def trim(self, spare: int = 0) -> int:
        """Give back the pages that hold nothing, but for room for `spare` positions more; how many these were."""
        top = max((live.index + 1 for live in self._live.values()), default=0)
        used = -(-max(top, self.length + len(self._live) + spare) // self._books.page_size)
        gone = self.pages[used:]
        if gone:
            self._books.release(gone)
            del self.pages[used:]
        return len(gone)

    def append(self, tokens: Iterable[int]) -> list[int]:
        """Commit tokens that were no nodes; returns their logical indices, whose KV is still to be written.

        Nodes that are there hang on a root of the past from now on: they remain until they are dropped, but
        nothing will ever look at them, so one that is in the way changes its index and leaves its KV behind.
        Raises ValueError without reserved room.
        """
        tokens = list(tokens)
        self._need_room(len(tokens))
        start, end = self.length, self.length + len(tokens)
        self.tokens += tokens
        if tokens:
            self._root = _appended(end)
            self._above.clear()
            self._displace()
        return list(range(start, end))

    def retract(self, count: int) -> None:
        """Take back the last `count` tokens, which were appended by mistake: no node hangs on them, and the prefix
        cache has not seen them. Their positions are room again."""
        del self.tokens[self.length - count :]
        self._root = _appended(self.length)
        self._above.clear()

    def check(self, tokens: int, nodes: Iterable[Node]) -> int:
        """Prove that `append` of so many tokens and then `add` of `nodes` would be legal, and change nothing.

        Returns the length that the deepest path would have. Raises as these do.
        """
        nodes = list(nodes)
        self._need_room(tokens + len(nodes))
        length = self.length + tokens
        places = self._places(nodes, _appended(length) if tokens else self._root, length)
        return max((position + 1 for _, position in places), default=length)

    def add(self, nodes: Iterable[Node]) -> list[int]:
        """Put nodes into scratch, parents before children; returns their logical indices.

        A parent is a live node, ROOT, or the id of the node committed last. Raises IllegalTransition for an
        unknown or outlived parent or an id in use, ValueError without reserved room; nothing is changed then.
        """
        nodes = list(nodes)
        self._need_room(len(nodes))
        places = self._places(nodes, self._root, self.length)
        indices = list(islice(self._free_indices(self.length), len(nodes)))
        for node, index, (parent, position) in zip(nodes, indices, places, strict=True):
            self._live[node.id] = _Live(index, parent, position, node.token)
        return indices

    def commit(self, ids: Seq[int], drop: Iterable[int] = ()) -> list[Move]:
        """Drop nodes, then commit a path of nodes below the root, oldest first.

        Returns the moves that bring the path to the committed end; a live node in its way changes places.
        Raises IllegalTransition if `ids` is no path below the root or a node is unknown; nothing is changed.
        """
        drop = set(drop)
        self._check_path(ids, drop)
        self.drop(drop)
        path = [self._live.pop(id) for id in ids]
        moves = [(live.index, self.length + i) for i, live in enumerate(path)]
        self.tokens += [live.token for live in path]
        if ids:
            self._root = ids[-1]
            moves += self._displace()
        return [(source, to) for source, to in moves if source != to]

    def drop(self, ids: Iterable[int]) -> None:
        """Free nodes. Raises IllegalTransition for an unknown one; nothing is changed then."""
        ids = set(ids)
        unknown = ids - self._live.keys()
        if unknown:
            raise IllegalTransition(f"no live nodes to drop: {sorted(unknown)}")
        self._above.clear()
        for id in ids:
            del self._live[id]

    def ancestors(self, id: int) -> list[int]:
        """Logical indices of a live node and the nodes above it, deepest first; not to be changed."""
        path = []
        while id in self._live and id not in self._above:
            path.append(id)
            id = self._live[id].parent
        seen, known = self._above.get(id, []), self._above if id in self._above or id == self._root else {}
        for below in reversed(path):
            seen = known[below] = [self._live[below].index, *seen]
        return seen

    def path(self, id: int) -> tuple[int, ...]:
        """Tokens from below the committed end down to a node, its own the last."""
        out = []
        live = self._live.get(id)
        while live is not None:
            out.append(live.token)
            live = self._live.get(live.parent)
        return tuple(reversed(out))

    def spell(self, tokens: Iterable[int]) -> list[int]:
        """Logical indices of the nodes that spell `tokens` below the committed end, as far as there are any."""
        out: list[int] = []
        above = self._root
        for token in tokens:
            child = next((id for id, live in self._live.items() if (live.parent, live.token) == (above, token)), None)
            if child is None:
                break
            out.append(self._live[child].index)
            above = child
        return out

    def position(self, id: int) -> int:
        """Absolute position in the text of a node's token; a child of the root stands at `length`."""
        return self._live[id].position

    def token(self, id: int) -> int:
        return self._live[id].token

    def name(self, id: int, token: int) -> None:
        """Say what a node's token is, which was not known when it was added."""
        self._live[id].token = token

    def location(self, index: int) -> int:
        """Row of the pool where a logical index lies."""
        size = self._books.page_size
        return self.pages[index // size] * size + index % size

    def spots(self, start: int, length: int) -> Spots:
        """Where logical indices start .. start+length-1 lie."""
        size = self._books.page_size
        return Spots(self.pages[start // size : -(-(start + length) // size)], start % size, size)

    def _places(self, nodes: Seq[Node], root: int, length: int) -> list[tuple[int, int]]:
        """(parent, position) of each node to add below `root`, or below nodes that hang on it."""
        new: dict[int, tuple[int, int]] = {}
        for node in nodes:
            if node.id in self._live or node.id in new or node.id < 0:
                raise IllegalTransition(f"node {node.id} is in use")
            if node.parent in (ROOT, root):
                new[node.id] = (root, length)
            elif node.parent in new:
                new[node.id] = (node.parent, new[node.parent][1] + 1)
            elif (root == self._root and node.parent in self._above) or self._top(node.parent) == root:
                new[node.id] = (node.parent, self._live[node.parent].position + 1)
            else:
                raise IllegalTransition(f"node {node.id}: parent {node.parent} does not hang on the committed end")
        return list(new.values())

    def _top(self, id: int) -> int | None:
        """What the topmost live ancestor of a live node hangs on; None if the node is not live."""
        top = None
        while id in self._live:
            id = top = self._live[id].parent
        return top

    def _check_path(self, ids: Seq[int], drop: set[int]) -> None:
        above = self._root
        for id in ids:
            live = self._live.get(id)
            if live is None or id in drop or live.parent != above:
                raise IllegalTransition(f"nodes {list(ids)} are no path from the committed end (at {id})")
            above = id

    def _displace(self) -> list[Move]:
        """Put every node below `length` on a free index above; moves of those that a step may still look at."""
        free = self._free_indices(self.length)
        moves = []
        for id, live in self._live.items():
            if live.index < self.length:
                to = next(free)
                if self._top(id) == self._root:
                    moves.append((live.index, to))
                live.index = to
        return moves

    def _free_indices(self, start: int) -> Iterator[int]:
        taken = {live.index for live in self._live.values()}
        return (index for index in count(start) if index not in taken)

    def _need_room(self, positions: int) -> None:
        if positions > self.room:
            raise ValueError(f"{positions} positions wanted, {self.room} reserved")


class Books:
    """Allocator and prefix cache together: opens and closes sequences, evicts when pages are short."""

    def __init__(self, allocator: PageAllocator, cache: PrefixCache | None) -> None:
        self.allocator = allocator
        self.cache = cache
        self.page_size = allocator.page_size

    def open(self, tokens: Seq[int], use_cache: bool = True) -> Sequence:
        """A sequence for a request that begins with `tokens`: its length is what the prefix cache held of them.

        At least the last token is left to compute, since its outcome is not cached.
        """
        pages = self.cache.match(tokens[:-1]) if self.cache is not None and use_cache else []
        return Sequence(self, pages, list(tokens[: len(pages) * self.page_size]))

    def publish(self, sequence: Sequence) -> None:
        """Put the whole committed pages of an open sequence, whose KV must be written, into the prefix cache."""
        if self.cache is not None:
            pages = sequence.length // self.page_size
            self.cache.insert(sequence.tokens[: pages * self.page_size], sequence.pages[:pages])

    def close(self, sequence: Sequence, keep: bool = True) -> None:
        """Release all pages of a sequence. keep: its whole committed pages go to the prefix cache."""
        if keep:
            self.publish(sequence)
        self.release(sequence.pages)
        sequence.pages.clear()

    def allocate(self, pages: int) -> list[int]:
        """Pages, evicted from the prefix cache if none are free. Raises OutOfPages."""
        if self.cache is not None and pages > self.allocator.free:
            self.cache.evict(pages - self.allocator.free)
        return self.allocator.allocate(pages)

    def release(self, pages: Iterable[int]) -> None:
        self.allocator.release(pages)

    def check(self, open_sequences: Iterable[Sequence]) -> None:
        """Prove that each page has exactly its holders. Raises AssertionError, naming the first that has not."""
        holders = Counter(self.cache.pages if self.cache is not None else ())
        for sequence in open_sequences:
            holders.update(sequence.pages)
        for page in range(self.allocator.num_pages):
            if self.allocator.references(page) != holders[page]:
                raise AssertionError(
                    f"page {page} has {self.allocator.references(page)} references and {holders[page]} holders"
                )
        if self.allocator.free + len(+holders) != self.allocator.num_pages:
            raise AssertionError(f"{self.allocator.free} free and {len(+holders)} held of {self.allocator.num_pages}")


def _appended(length: int) -> int:
    """Names the root of a sequence whose last token was no node: below every node id, and ROOT, for ever."""
    return ROOT - 1 - length
