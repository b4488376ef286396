"""What is told of a token beside the token: its logprob, its rank, and the likeliest tokens with theirs.

Knows distributions and tokens. Does not know who asked, or whether a token was drawn or given. Everything is computed
where the logits are, and copied to the host without waiting for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from distspec.copies import integers, to_host
from distspec.protocol.values import SamplingParams, TokenLogprobs
from distspec.sampling.draw import GREEDY_BELOW, SamplingRows, process, stay


@dataclass(frozen=True, slots=True)
class Told:
    """Of one token per row. integers: int64 [rows, 1 + most], the token's rank, then the likeliest tokens; reals:
    float32 [rows, 1 + most], the logprobs of all of them."""

    integers: Tensor
    reals: Tensor

    def to_host(self) -> Told:
        """A copy, to be read once the device has done what was asked of it before."""
        return Told(to_host(self.integers), to_host(self.reals))

    def read(self, most: Sequence[int]) -> list[TokenLogprobs]:
        """On the host. most: of each row, how many of the likeliest tokens are told; those that cannot be are not."""
        rows = zip(self.integers.tolist(), self.reals.tolist(), most, strict=True)
        return [
            TokenLogprobs(
                logprob=logprobs[0],
                rank=rank,
                top=tuple(pair for pair in zip(tokens[:count], logprobs[1:], strict=False) if pair[1] > -inf),
            )
            for (rank, *tokens), logprobs, count in rows
        ]


class Telling:
    """Of rows that are drawn, those that ask. params: of each row. is_raw: told is what the model says, else what is
    drawn from."""

    def __init__(self, params: Sequence[SamplingParams], is_raw: bool, device: torch.device) -> None:
        self._most = {row: one.logprobs for row, one in enumerate(params) if one.logprobs is not None}
        self._is_raw = is_raw
        self._scores: Tensor | None = None
        self._all = len(self._most) == len(params)
        self._index = integers(list(self._most), device) if self._most and not self._all else None

    def before(self, logits: Tensor) -> None:
        """Logits of the rows, before anything changes them: float32 [rows, vocab]."""
        if self._most and self._is_raw:
            self._scores = logits.clone() if self._index is None else logits[self._index]

    def after(self, logits: Tensor, rows: SamplingRows, tokens: Tensor) -> Told | None:
        """What the rows were drawn from, how, and what was drawn: int64 [rows]. Of the rows that ask, on the device."""
        if not self._most:
            return None
        if self._index is not None:
            tokens = tokens[self._index]
        if self._scores is None:
            if self._index is not None:
                logits, rows = logits[self._index], rows.select(list(self._most))
            self._scores = processed(logits, rows, tokens)
        return tell(self._scores, tokens, max(self._most.values()))

    def read(self, told: Told, rows: Iterable[int]) -> dict[int, TokenLogprobs]:
        """Of those among the rows that ask. told: what `after` gave, on the host."""
        places = {row: place for place, row in enumerate(self._most)}
        asking = [row for row in rows if row in places]
        index = torch.tensor([places[row] for row in asking], dtype=torch.int64)
        some = Told(told.integers[index], told.reals[index])
        return dict(zip(asking, some.read([self._most[row] for row in asking]), strict=True))


def tell(scores: Tensor, tokens: Tensor, most: int) -> Told:
    """scores: float32 [rows, vocab], log p up to a constant per row; tokens: int64 [rows]. A rank is one more than the
    number of likelier tokens."""
    most = min(most, scores.shape[1])
    if scores.is_cuda:
        from distspec.kernels.tell import MOST, tell_whole  # imports Triton

        if most <= MOST:
            return Told(*tell_whole(scores, tokens, most))
    mass = scores.logsumexp(dim=-1, keepdim=True)
    own = scores.gather(1, tokens[:, None])
    rank = 1 + (scores > own).sum(dim=-1, keepdim=True)
    top = scores.topk(most, dim=-1)
    return Told(torch.cat((rank, top.indices), dim=1), torch.cat((own, top.values), dim=1) - mass)


def processed(logits: Tensor, rows: SamplingRows, drawn: Tensor) -> Tensor:
    """float32 [rows, vocab], new: log p up to a constant per row, of which `draw` has drawn these tokens with the same
    arguments; of greedy rows, the logits."""
    if logits.is_cuda:
        return _processed_fused(logits, rows, drawn)
    if len(rows.sampled) == len(logits):
        return process(logits, rows)
    scores = logits.clone()
    if rows.sampled:
        index = torch.tensor(rows.sampled)
        scores[index] = process(logits[index], rows.select(rows.sampled))
    return scores


def _processed_fused(logits: Tensor, rows: SamplingRows, drawn: Tensor) -> Tensor:
    """By search instead of a sort. At the edge of what stays, rounding may tell it from the draw; the draw is right."""
    is_sampled = rows.temperature >= GREEDY_BELOW
    scores = logits / torch.where(is_sampled, rows.temperature, 1.0)[:, None]
    if rows.truncated:
        stays = stay(logits, rows)
        depth = torch.where(is_sampled, stays.depth, inf)
        forbidden = stays.top[:, None] - scores > depth[:, None]
        scores.masked_fill_(forbidden.scatter_(1, drawn[:, None], False), -inf)
    return scores
