"""From what requests ask for, and their texts, to the edits of a step.

Knows the parameters of each slot and which tokens it was drawn after. Does not know models, pages, or how logits are
changed. A wanted row is judged by its own text: what is committed, then the tokens of its own path.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from distspec.copies import integers, to_device
from distspec.protocol.values import SamplingParams
from distspec.sampling.edits import WORD, Bans, Bias, Edit, Mask, Penalties, packed
from distspec.sampling.tables import Biases, Counts

Path = tuple[int, ...]


class Masker(Protocol):
    """What a constraint lets follow a text. One per slot."""

    def fill(self, text: Sequence[int], paths: Sequence[Path], bits: Tensor) -> None:
        """Clear the bit of every token that may not follow text + paths[i] in bits[i], which lets all stay.

        text: what is committed, prompt included. bits: int32 [paths, words] on the host, see edits.Mask. Nobody accepts
        a path that breaks the constraint, so anything may stay below one; but never nothing.
        """


@dataclass(frozen=True, slots=True)
class Asked:
    """Wanted rows of one slot in a step: those from `first` on, one per path. text[:length] is what all of them follow;
    the list is the sequence's own."""

    slot: int
    first: int
    text: Sequence[int]
    length: int
    paths: Sequence[Path]

    @property
    def committed(self) -> Sequence[int]:
        return self.text if self.length == len(self.text) else self.text[: self.length]


class _BadWords:
    """Token sequences that may not come up, found by the token before their last: a request may name hundreds, of which
    few are under way at any row. longest: tokens of one. alone: int64 [any], on the host, those of one token."""

    def __init__(self, words: Sequence[Path], vocab: int) -> None:
        self.longest = max(map(len, words), default=0)
        self.alone = torch.tensor([word[0] for word in words if len(word) == 1 and word[0] < vocab], dtype=torch.int64)
        self._after: dict[int, list[Path]] = defaultdict(list)
        for word in words:
            if len(word) > 1 and word[-1] < vocab:
                self._after[word[-2]].append(word)

    def ends(self, output: Path) -> set[int]:
        """Tokens that would complete a longer word after this output."""
        under_way = self._after.get(output[-1], ()) if output else ()
        return {word[-1] for word in under_way if output[1 - len(word) :] == word[:-1]}


@dataclass(slots=True)
class _Slot:
    """allowed: int32 [words], on the host. words: the bad ones. counted: tokens of the text that the counts hold."""

    params: SamplingParams
    masker: Masker | None
    allowed: Tensor | None
    words: _BadWords
    counted: int = 0

    @property
    def masked(self) -> bool:
        return self.masker is not None or self.allowed is not None

    @property
    def bans(self) -> bool:
        """Some token may be banned somewhere."""
        return bool(self.params.bad_words or self.params.min_tokens)

    @property
    def penalized(self) -> bool:
        return _penalized(self.params)


def edited(params: SamplingParams) -> bool:
    """Whether the logits of such a request are changed before they are scaled."""
    masked = params.constraint or params.allowed_token_ids or params.bad_words or params.min_tokens
    return bool(masked or params.logit_bias) or _penalized(params)


def _penalized(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


class Editor:
    """Slots that ask for edits of their logits; the others are none of its business.

    vocab: of the logits. A token that is none of them is no concern of theirs.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._device = device
        self._slots: dict[int, _Slot] = {}
        self._all = packed(torch.ones(vocab, dtype=torch.bool))
        self._biases = Biases(vocab, device)
        self._counts = Counts(vocab, device)

    def open(self, slot: int, params: SamplingParams, masker: Masker | None = None) -> None:
        if edited(params) or masker is not None:
            known = [token for token in params.allowed_token_ids if token < self._vocab]
            self._slots[slot] = _Slot(
                params, masker, self._packed(known) if known else None, _BadWords(params.bad_words, self._vocab)
            )
        if params.logit_bias:
            self._biases.open(slot, params)
        if _penalized(params):
            self._counts.open(slot, params)

    def close(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def edits(self, asked: Sequence[Asked]) -> list[Edit]:
        """Of the wanted rows of a step, in the order in which they are to be applied. Every slot is one of its own."""
        found: list[Edit] = []
        slots = [self._slots[ask.slot] for ask in asked]
        pairs = list(zip(asked, slots, strict=True))
        if some := [ask for ask, slot in pairs if slot.masked]:
            found.append(self._mask(some))
        if some := [ask for ask, slot in pairs if slot.bans and not slot.masked]:
            found += self._bans(some)
        if some := [ask for ask, slot in pairs if slot.params.logit_bias]:
            rows, numbers = self._integers(*_rows(some))
            found.append(Bias(rows, numbers, self._biases.tokens, self._biases.values))
        if some := [ask for ask, slot in pairs if slot.penalized]:
            found.append(self._penalties(some))
        return found

    def _bans(self, asked: Sequence[Asked]) -> list[Bans]:
        """One, or none where nothing is banned now."""
        found = [
            (row, token) for ask in asked for row, tokens in enumerate(self._banned(ask), ask.first) for token in tokens
        ]
        parts = [torch.tensor([value for pair in found for value in pair], dtype=torch.int64).view(-1, 2)]
        for ask in asked:
            # The same in every row, and maybe hundreds.
            rows = torch.arange(ask.first, ask.first + len(ask.paths))
            parts.append(torch.cartesian_prod(rows, self._slots[ask.slot].words.alone))
        pairs = torch.cat(parts)
        return [Bans(*to_device(pairs.T.contiguous(), self._device))] if len(pairs) else []

    def _penalties(self, asked: Sequence[Asked]) -> Penalties:
        self._count(asked)
        depth = max(len(path) for ask in asked for path in ask.paths)
        paths = [
            token if token < self._vocab else -1
            for ask in asked
            for path in ask.paths
            for token in (*path, *[-1] * (depth - len(path)))
        ]
        rows, slots, nodes = self._integers(*_rows(asked), paths)
        return Penalties(rows, slots, nodes.view(len(rows), depth), self._counts.penalties, self._counts.seen)

    def _count(self, asked: Sequence[Asked]) -> None:
        """Bring the counts up to what is committed."""
        prompt: list[int] = []
        output: list[int] = []
        for ask in asked:
            slot = self._slots[ask.slot]
            start, middle, end = slot.counted, slot.params.prompt_tokens, ask.length
            prompt += self._counts.places(ask.slot, ask.text[start : min(middle, end)])
            output += self._counts.places(ask.slot, ask.text[max(start, middle) : end])
            slot.counted = end
        if prompt or output:
            self._counts.add(*self._integers(prompt, output))

    def _mask(self, asked: Sequence[Asked]) -> Mask:
        """Of what is allowed, bans take away what they can without leaving nothing; a constraint is not bent."""
        rows, _ = _rows(asked)
        bits = self._all.repeat(len(rows), 1)  # not pinned yet: a grammar writes it word by word
        start = 0
        for ask in asked:
            slot, some = self._slots[ask.slot], bits[start : start + len(ask.paths)]
            start += len(ask.paths)
            if slot.masker is not None:
                slot.masker.fill(ask.committed, ask.paths, some)
                if slot.allowed is not None:
                    _narrow_(some, slot.allowed)
            elif slot.allowed is not None:
                some.copy_(slot.allowed)
            alone = slot.words.alone.tolist()
            alike: dict[frozenset[int], list[int]] = defaultdict(list)
            for row, tokens in enumerate(self._banned(ask)):
                alike[frozenset(tokens).union(alone)].append(row)
            for banned, numbers in alike.items():
                if banned:
                    self._ban_(some, numbers, banned)
        (at,) = self._integers(rows)
        return Mask(at, to_device(bits, self._device))

    def _ban_(self, bits: Tensor, rows: list[int], tokens: Iterable[int]) -> None:
        """Clear the bits of tokens in rows of which that leaves some. Far fewer tokens than a vocabulary has."""
        words: dict[int, int] = defaultdict(int)
        for token in tokens:
            words[token // WORD] |= 1 << token % WORD
        before = bits[rows]
        left = before.clone()
        left[:, list(words)] &= ~torch.tensor(list(words.values()), dtype=torch.int64).to(torch.int32)
        bits[rows] = left.where((left & self._all).any(dim=-1, keepdim=True), before)

    def _banned(self, ask: Asked) -> list[set[int]]:
        """Of each row, beside bad words of one token. Only as much of the output is looked at as the longest bad word
        has tokens."""
        slot = self._slots[ask.slot]
        params, words = slot.params, slot.words
        if not slot.bans:
            return [set() for _ in ask.paths]
        start = max(params.prompt_tokens, ask.length - words.longest)
        tail, held_back = tuple(ask.text[start : ask.length]), params.min_tokens - (ask.length - params.prompt_tokens)
        found = []
        for path in ask.paths:
            tokens = words.ends(tail + path)
            if len(path) < held_back:
                tokens.update(token for token in params.stop_token_ids if token < self._vocab)
            found.append(tokens)
        return found

    def _packed(self, tokens: Sequence[int]) -> Tensor:
        stays = torch.zeros(self._vocab, dtype=torch.bool)
        stays[tokens] = True
        return packed(stays)

    def _integers(self, *columns: Sequence[int]) -> tuple[Tensor, ...]:
        """Each column on the device; all travel in one copy."""
        whole = integers([value for column in columns for value in column], self._device)
        parts: tuple[Tensor, ...] = torch.split(whole, [len(column) for column in columns])
        return parts


def _rows(asked: Sequence[Asked]) -> tuple[list[int], list[int]]:
    """Rows, and the slot of each."""
    rows = [ask.first + i for ask in asked for i in range(len(ask.paths))]
    return rows, [ask.slot for ask in asked for _ in ask.paths]


def _narrow_(bits: Tensor, to: Tensor) -> None:
    """Only bits of `to` stay set, but in rows of which that leaves none. bits: int32 [..., words]."""
    both = bits & to
    bits.copy_(both.where(both.any(dim=-1, keepdim=True), bits))
