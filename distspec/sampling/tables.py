"""What stays on the device of each slot from step to step: its bias, its penalties, and how often each token came up.

Knows slots and tokens. Does not know texts, rows or paths. Tables are made when the first request needs them and grow
with the highest slot that does, so that nobody pays for what nobody asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distspec.copies import integers, to_device
from distspec.protocol.values import SamplingParams
from distspec.sampling.edits import IN_PROMPT


class Biases:
    """tokens int64 [slots, most], -1 past the last one of a slot; values float32 [slots, most]."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self.tokens = torch.empty(0, 0, dtype=torch.int64, device=device)
        self.values = torch.empty(0, 0, dtype=torch.float32, device=device)

    def open(self, slot: int, params: SamplingParams) -> None:
        bias = {token: value for token, value in params.logit_bias if token < self._vocab}
        most = max(1, len(bias))
        # Both or none: kernels read the one by the width of the other, and there may be no memory for the second.
        self.tokens, self.values = _room(self.tokens, slot + 1, most, fill=-1), _room(self.values, slot + 1, most)
        self.tokens[slot] = -1
        device = self.tokens.device
        self.tokens[slot, : len(bias)] = integers(list(bias), device)
        self.values[slot, : len(bias)] = to_device(torch.tensor(list(bias.values()), dtype=torch.float32), device)


class Counts:
    """penalties float32 [slots, 3]: repetition, presence, frequency; seen int32 [slots, vocab]: how often a token came
    up in the output, and IN_PROMPT on top if it did in the prompt."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.penalties = torch.empty(0, 3, dtype=torch.float32, device=device)
        self.seen = torch.empty(0, vocab, dtype=torch.int32, device=device)

    def open(self, slot: int, params: SamplingParams) -> None:
        rows = slot + 1
        self.penalties, self.seen = _room(self.penalties, rows, 3), _room(self.seen, rows, self.seen.shape[1])
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        self.penalties[slot] = to_device(torch.tensor(penalties, dtype=torch.float32), self.seen.device)
        self.seen[slot] = 0

    def add(self, prompt: Tensor, output: Tensor) -> None:
        """Tokens that came up, int64 [n] as slot * vocab + token. Those of a prompt come before its output's."""
        flat = self.seen.view(-1)
        flat.index_fill_(0, prompt, IN_PROMPT)
        flat.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def places(self, slot: int, tokens: Sequence[int]) -> list[int]:
        """Of tokens, as `add` takes them."""
        vocab = self.seen.shape[1]
        return [slot * vocab + token for token in tokens if token < vocab]


def _room(table: Tensor, rows: int, columns: int, fill: int = 0) -> Tensor:
    """The table, or a larger one that holds it, in powers of two; fill: what else it holds."""
    wanted = [
        have if have >= need else 1 << (need - 1).bit_length()
        for have, need in zip(table.shape, (rows, columns), strict=True)
    ]
    if wanted == list(table.shape):
        return table
    larger = table.new_full(wanted, fill)
    larger[: table.shape[0], : table.shape[1]] = table
    return larger
