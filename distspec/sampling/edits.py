"""What a request changes of its logits before they are scaled: masks, bans, bias, penalties.

Knows logits, rows and tables on their device. Does not know requests, texts or why: sampling/editor.py does. Each edit
names the rows that it changes, so rows that asked for nothing cost nothing, and a step without edits launches nothing.
All change logits in place. Those of a step follow each other in the order of SamplingParams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

WORD = 32
"""Tokens to a word of a mask."""

IN_PROMPT = 1 << 30
"""Added to the count of a token that is in the prompt."""


class Edit(Protocol):
    def apply_(self, logits: Tensor) -> None:
        """logits: float32 [rows, vocab], rows contiguous."""


@dataclass(frozen=True, slots=True)
class Mask:
    """Of each named row only some tokens stay. rows: int64 [n]; bits: int32 [n, ceil(vocab / 32)], where token t is bit
    t % 32 of word t // 32, set if it stays (the layout of xgrammar's bitmasks)."""

    rows: Tensor
    bits: Tensor

    def apply_(self, logits: Tensor) -> None:
        if logits.is_cuda:
            from distspec.kernels.edit import mask_  # imports Triton

            return mask_(logits, self.rows, self.bits)
        forbidden = ~unpacked(self.bits, logits.shape[1])
        logits[self.rows] = logits[self.rows].masked_fill_(forbidden, -torch.inf)


@dataclass(frozen=True, slots=True)
class Bans:
    """Single tokens that do not stay: rows, tokens int64 [n]."""

    rows: Tensor
    tokens: Tensor

    def apply_(self, logits: Tensor) -> None:
        # A number of Python's would be copied to the device first, which waits for it.
        logits.index_put_((self.rows, self.tokens), logits.new_full((), -torch.inf))


@dataclass(frozen=True, slots=True)
class Bias:
    """Added to some tokens. rows, slots: int64 [n], the slot whose bias a row gets; tokens, values: tables.Biases."""

    rows: Tensor
    slots: Tensor
    tokens: Tensor
    values: Tensor

    def apply_(self, logits: Tensor) -> None:
        if logits.is_cuda:
            from distspec.kernels.edit import add_bias_

            return add_bias_(logits, self.rows, self.slots, self.tokens, self.values)
        tokens, values = self.tokens[self.slots], self.values[self.slots]
        biased = tokens >= 0
        rows = self.rows[:, None].expand_as(tokens)
        logits.index_put_((rows[biased], tokens[biased]), values[biased], accumulate=True)


@dataclass(frozen=True, slots=True)
class Penalties:
    """For tokens that came up before: logits above 0 are divided by repetition, others multiplied (CTRL, arXiv
    1909.05858), of tokens in prompt or output; then frequency times their count in the output is subtracted, then
    presence once (as OpenAI and vLLM define them).

    rows, slots: int64 [n], the slot whose text a row follows; paths: int64 [n, depth], what else it follows, which is
    output, -1 past its end. penalties, seen: see tables.Counts.
    """

    rows: Tensor
    slots: Tensor
    paths: Tensor
    penalties: Tensor
    seen: Tensor

    def apply_(self, logits: Tensor) -> None:
        if logits.is_cuda:
            from distspec.kernels.edit import penalize_

            return penalize_(logits, self.rows, self.slots, self.paths, self.penalties, self.seen, IN_PROMPT)
        seen = self.seen[self.slots]
        seen.scatter_add_(1, self.paths.clamp(min=0), (self.paths >= 0).to(torch.int32))
        repetition, presence, frequency = self.penalties[self.slots].T[..., None]
        output = seen % IN_PROMPT
        scores = logits[self.rows]
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen > 0, repeated, scores)
        logits[self.rows] = scores - frequency * output - presence * (output > 0)


def packed(stays: Tensor) -> Tensor:
    """int32 [..., ceil(vocab / 32)] of bool [..., vocab], in the layout of Mask."""
    padded = torch.nn.functional.pad(stays, (0, -stays.shape[-1] % WORD))
    bits = padded.view(*stays.shape[:-1], -1, WORD).long() << torch.arange(WORD, device=stays.device)
    return bits.sum(dim=-1).to(torch.int32)


def unpacked(bits: Tensor, vocab: int) -> Tensor:
    """bool [..., vocab] of a mask."""
    each = bits[..., None] >> torch.arange(WORD, dtype=torch.int32, device=bits.device) & 1
    stays: Tensor = each.flatten(-2)[..., :vocab].bool()
    return stays
