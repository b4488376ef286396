"""Where the end of a text occurred before, and what followed: once by dictionaries, once by comparing tensors.

Knows tokens of texts and of paths below them. Does not know trees, scores or who asks. Both matchers give the same
answers; which one is faster depends on where they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from distspec.copies import integers

_LEAST_WIDTH = 256  # of a buffer of texts on the device, in tokens


class Edit(NamedTuple):
    """The text of `request` is cut to `start` tokens, and `tokens` follow."""

    request: int
    start: int
    tokens: Sequence[int]


class Query(NamedTuple):
    """The text of `request` and `path` after it."""

    request: int
    path: Sequence[int]


class Run(NamedTuple):
    """What followed an earlier occurrence of the last `size` tokens."""

    tokens: Sequence[int]
    size: int


class Matcher(Protocol):
    """Texts, and look-ups in them.

    A look-up finds earlier occurrences of the sequence's last tokens, from max_n down to min_n of them, the longest
    first and of equals the latest; of those with the same next token only the first counts. What followed is read on
    past the end of the sequence into itself, so that what repeats itself goes on doing so.
    """

    def write(self, edits: Sequence[Edit]) -> None:
        """Bring texts up to date; distinct requests. One that is not known is empty."""
        ...

    def lookup(self, queries: Sequence[Query], topk: int, count: int) -> list[list[Run]]:
        """For each query at most topk runs of `count` tokens. Its request is known."""
        ...

    def forget(self, request: int) -> None:
        """One that is not known is fine."""
        ...


class HostMatcher:
    """One index of n-grams per request, kept up to date token by token, so that a look-up costs microseconds."""

    def __init__(self, *, max_n: int, min_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)
        self._texts: dict[int, _Index] = {}

    def write(self, edits: Sequence[Edit]) -> None:
        for edit in edits:
            text = self._texts.setdefault(edit.request, _Index(self._sizes))
            text.cut(edit.start)
            text.extend(edit.tokens)

    def lookup(self, queries: Sequence[Query], topk: int, count: int) -> list[list[Run]]:
        return [self._texts[query.request].lookup(query.path, topk, count) for query in queries]

    def forget(self, request: int) -> None:
        self._texts.pop(request, None)


class _Index:
    """A text and, for each n-gram of it, the ends of all its occurrences in ascending order.

    Occurrences form stacks because a sequence is only ever cut or extended at its end: undoing a token pops
    what adding it pushed.
    """

    def __init__(self, sizes: range) -> None:
        self._tokens: list[int] = []
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._tokens.append(token)
            for gram in self._grams():
                self._ends.setdefault(gram, []).append(len(self._tokens))

    def cut(self, length: int) -> None:
        while len(self._tokens) > length:
            for gram in self._grams():
                ends = self._ends[gram]
                ends.pop()
                if not ends:
                    del self._ends[gram]
            self._tokens.pop()

    def lookup(self, path: Sequence[int], topk: int, count: int) -> list[Run]:
        length = len(self._tokens)
        self.extend(path)
        runs = self._runs(topk, count)
        self.cut(length)
        return runs

    def _runs(self, topk: int, count: int) -> list[Run]:
        found: dict[int, Run] = {}
        for gram in self._grams():
            ends = self._ends[gram]
            for end in reversed(range(len(ends) - 1)):  # the last one is the end of the text
                if len(found) == topk:
                    return list(found.values())
                if self._tokens[ends[end]] not in found:
                    found[self._tokens[ends[end]]] = Run(self._read(ends[end], count), len(gram))
        return list(found.values())

    def _read(self, start: int, count: int) -> list[int]:
        tokens = self._tokens[start : start + count]
        return (tokens * -(-count // len(tokens)))[:count]

    def _grams(self) -> Iterator[tuple[int, ...]]:
        """The text's own last n-grams, longest first."""
        end = len(self._tokens)
        return (tuple(self._tokens[end - size :]) for size in self._sizes if size <= end)


class DeviceMatcher:
    """All texts in one buffer on the device, appended to in place; a look-up is one batch without waiting in between.

    The buffer grows by doubling: int32 [slots, width].
    """

    def __init__(self, *, max_n: int, min_n: int, device: torch.device) -> None:
        self._max_n, self._min_n = max_n, min_n
        self._device = device
        self._texts = torch.zeros(0, _LEAST_WIDTH, dtype=torch.int32, device=device)
        self._lengths: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        self._free: list[int] = []

    def write(self, edits: Sequence[Edit]) -> None:
        for edit in edits:
            self._lengths[edit.request] = edit.start + len(edit.tokens)
            if edit.request not in self._slots:
                if not self._free:
                    self._grow(slots=max(8, 2 * len(self._texts)), width=self._texts.shape[1])
                self._slots[edit.request] = self._free.pop()
        self._grow(slots=len(self._texts), width=max((self._lengths[edit.request] for edit in edits), default=0))
        _put(self._texts, [(self._slots[edit.request], edit.start, edit.tokens) for edit in edits])

    def lookup(self, queries: Sequence[Query], topk: int, count: int) -> list[list[Run]]:
        lengths = [self._lengths[query.request] for query in queries]
        ends = [length + len(query.path) for length, query in zip(lengths, queries, strict=True)]
        width = _width(max(ends, default=0))
        self._grow(slots=len(self._texts), width=width)
        slots = integers([self._slots[query.request] for query in queries], self._device)
        texts = self._texts[:, :width].index_select(0, slots)
        _put(texts, [(i, length, query.path) for i, (length, query) in enumerate(zip(lengths, queries, strict=True))])
        at = integers(ends, self._device)
        runs, sizes = lookup(texts, at, max_n=self._max_n, min_n=self._min_n, topk=topk, count=count)
        answers = torch.cat((sizes[:, :, None], runs), dim=2).tolist()  # the one place that waits for the device
        return [[Run(run[1:], run[0]) for run in answer if run[0]] for answer in answers]

    def forget(self, request: int) -> None:
        if request in self._slots:
            self._free.append(self._slots.pop(request))
            del self._lengths[request]

    def _grow(self, *, slots: int, width: int) -> None:
        had, wide = self._texts.shape
        if slots > had or width > wide:
            texts = torch.zeros(slots, max(wide, _width(width)), dtype=torch.int32, device=self._device)
            texts[:had, :wide] = self._texts
            self._texts = texts
            self._free += range(had, slots)


def lookup(texts: Tensor, lengths: Tensor, *, max_n: int, min_n: int, topk: int, count: int) -> tuple[Tensor, Tensor]:
    """What followed earlier occurrences of each text's own end; as in `Matcher`.

    texts: int32 [rows, width]; lengths: int64 [rows], at most width, tokens past them are ignored.
    Returns runs, int32 [rows, topk, count], and sizes, int32 [rows, topk]: tokens that matched, 0 where there is no
    such run. Shapes depend on arguments alone and nothing waits for the device, so a CUDA graph can capture it.
    Prompt Lookup Decoding (A. Saxena, 2023).
    """
    rows, width = texts.shape
    at = torch.arange(width, dtype=torch.int32, device=texts.device)  # an occurrence ends before it, at[i] follows
    alive = at < lengths[:, None]
    size = torch.zeros(rows, width, dtype=torch.int32, device=texts.device)
    for back in range(1, min(max_n, width - 1) + 1):
        last = texts.gather(1, (lengths[:, None] - back).clamp(min=0))
        alive[:, back:] &= texts[:, :-back] == last
        alive[:, :back] = False
        size += alive
    rank = torch.where(size >= min_n, size * width + at, -1)
    sizes, starts = [], []
    for _ in range(topk):
        best, start = rank.max(dim=1, keepdim=True)
        sizes.append(torch.where(best < 0, 0, best // width))
        starts.append(start)
        rank = rank.masked_fill(texts == texts.gather(1, start), -1)
    first = torch.cat(starts, dim=1)[:, :, None]
    period = (lengths[:, None, None] - first).clamp(min=1)
    ahead = torch.arange(count, device=texts.device)
    runs = texts.gather(1, (first + ahead % period).flatten(1)).view(rows, topk, count)
    return runs, torch.cat(sizes, dim=1)


def _put(texts: Tensor, pieces: Sequence[tuple[int, int, Sequence[int]]]) -> None:
    """Write tokens into rows of [rows, width], in place: (row, first column, tokens)."""
    cells = [(row, start + i, token) for row, start, tokens in pieces for i, token in enumerate(tokens)]
    if cells:
        row, column, token = integers([value for cell in cells for value in cell], texts.device).view(-1, 3).T
        texts[row, column] = token.to(texts.dtype)


def _width(tokens: int) -> int:
    """Room for so many tokens: a power of two, so that few shapes occur."""
    return max(_LEAST_WIDTH, 1 << max(0, tokens - 1).bit_length())
