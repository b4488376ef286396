"""From what requests ask for, and their texts, to the edits of a step.

Knows the parameters of each slot and which tokens it was drawn after. Does not know models, pages, or how logits are
changed. A wanted row is judged by its own text: what is committed, then the tokens of its own path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from distspec.protocol.values import SamplingParams
from distspec.sampling.edits import Bans, Edit, Mask, packed

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


@dataclass(frozen=True, slots=True)
class _Slot:
    """allowed: int32 [words], on the host."""

    params: SamplingParams
    masker: Masker | None
    allowed: Tensor | None

    @property
    def masked(self) -> bool:
        return self.masker is not None or self.allowed is not None


def edited(params: SamplingParams) -> bool:
    """Whether the logits of such a request are changed before they are scaled."""
    return bool(params.constraint or params.allowed_token_ids or params.bad_words or params.min_tokens)


def banned(params: SamplingParams, output: Sequence[int], before: int = 0) -> set[int]:
    """Tokens that may not follow an output of `before` tokens and then these."""
    found = {word[-1] for word in params.bad_words if _ends_with(output, word[:-1])}
    if before + len(output) < params.min_tokens:
        found.update(params.stop_token_ids)
    return found


def _ends_with(output: Sequence[int], tokens: Path) -> bool:
    return not tokens or tuple(output[-len(tokens) :]) == tokens


class Editor:
    """Slots that ask for edits of their logits; the others are none of its business.

    vocab: of the logits. A token that is none of them, as a drafter may have fewer, is no concern of theirs.
    """

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._device = device
        self._slots: dict[int, _Slot] = {}
        self._all = packed(torch.ones(vocab, dtype=torch.bool))

    def open(self, slot: int, params: SamplingParams, masker: Masker | None = None) -> None:
        if edited(params) or masker is not None:
            allowed = self._packed(params.allowed_token_ids) if params.allowed_token_ids else None
            self._slots[slot] = _Slot(params, masker, allowed)

    def close(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def edits(self, asked: Sequence[Asked]) -> list[Edit]:
        """Of the wanted rows of a step, in the order in which they are to be applied. Every slot is one of its own."""
        found: list[Edit] = []
        if masked := [ask for ask in asked if self._slots[ask.slot].masked]:
            found.append(self._mask(masked))
        bans = [
            (row, token)
            for ask in asked
            if not self._slots[ask.slot].masked
            for row, tokens in enumerate(self._banned(ask), ask.first)
            for token in tokens
        ]
        if bans:
            found.append(Bans(*(self._integers(column) for column in zip(*bans, strict=True))))
        return found

    def _mask(self, asked: Sequence[Asked]) -> Mask:
        """Of what is allowed, bans take away what they can without leaving nothing; a constraint is not bent."""
        rows = [ask.first + i for ask in asked for i in range(len(ask.paths))]
        bits = self._all.repeat(len(rows), 1)
        start = 0
        for ask in asked:
            slot, some = self._slots[ask.slot], bits[start : start + len(ask.paths)]
            start += len(ask.paths)
            if slot.masker is not None:
                slot.masker.fill(ask.committed, ask.paths, some)
            for row, tokens in zip(some, self._banned(ask), strict=True):
                if slot.allowed is not None:
                    _narrow_(row, slot.allowed)
                if tokens:
                    _narrow_(row, self._all & ~self._packed(tokens))
        if self._device.type == "cuda":
            bits = bits.pin_memory()
        return Mask(self._integers(rows), bits.to(self._device, non_blocking=True))

    def _banned(self, ask: Asked) -> list[set[int]]:
        """Of each row. Only as much of the output is looked at as the longest bad word has tokens."""
        params = self._slots[ask.slot].params
        longest = max((len(word) for word in params.bad_words), default=0)
        start = max(params.prompt_tokens, ask.length - longest)
        tail, before = tuple(ask.text[start : ask.length]), start - params.prompt_tokens
        found = (banned(params, tail + path, before) for path in ask.paths)
        return [{token for token in tokens if token < self._vocab} for tokens in found]

    def _packed(self, tokens: Iterable[int]) -> Tensor:
        stays = torch.zeros(self._vocab, dtype=torch.bool)
        stays[[token for token in tokens if token < self._vocab]] = True
        return packed(stays)

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)


def _narrow_(row: Tensor, to: Tensor) -> None:
    """Only bits of `to` stay set, unless that leaves none."""
    both = row & to
    if bool(both.any()):
        row.copy_(both)
