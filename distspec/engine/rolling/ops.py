"""The small change of rounds that no host looks at: where rows stand, how they are drawn, and what was accepted.

Knows tensors by slot. Does not know models, attention or pages. Plain torch; on CUDA the kernels of kernels/rolling.py
do the same in one launch each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distspec.sampling.noise import STEP, mix_, signed

_OUTCOME, _RANK, _WRONG = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Spread:
    """positions: int64 [rows]; integers: int64 [rows, 4], top_k, seed, choice and the position of the token to be
    drawn; reals: float32 [rows, 3], temperature, top_p, min_p."""

    positions: Tensor
    integers: Tensor
    reals: Tensor

    def part(self, start: int, end: int, every: int = 1) -> Spread:
        """The last of each `every` rows of start .. end-1."""
        some = slice(start + every - 1, end, every)
        return Spread(self.positions[some], self.integers[some], self.reals[some])


def spread(
    lengths: Tensor, keys: Tensor, reals: Tensor, slots: Tensor, offset: int, count: int, *, stepwise: bool = False
) -> Spread:
    """Rows of `count` tokens of each slot, from position lengths[slot] + offset on; below 0 stands 0.

    lengths: int64 [slots + 1]; keys: int64 [slots + 1, 3], top_k, seed, choice; reals: float32 [slots + 1, 3]; slots:
    int64 [n], of these; the last one only pads and stands at 0. Slot after slot, or stepwise: token after token.
    """
    if lengths.is_cuda:
        from distspec.kernels import rolling  # imports Triton

        return Spread(*rolling.spread(lengths, keys, reals, slots, offset, count, stepwise))
    at = (lengths[slots, None] + offset + torch.arange(count)).clamp(min=0)
    at[slots == len(lengths) - 1] = 0
    own = slots[:, None].expand(-1, count)
    at, own = (x.t().flatten() if stepwise else x.flatten() for x in (at, own))
    return Spread(at, torch.cat((keys[own], at[:, None] + 1), 1), reals[own])


def settle(lengths: Tensor, last: Tensor, slots: Tensor, chain: Tensor, outcomes: Tensor) -> Tensor:
    """Accept the drafts that lead as long as each equals the outcome before it, and move texts on by these and the
    outcome after the last of them.

    lengths: int64 [slots + 1]; last: int64 [slots + 1, 2], the last two tokens; both are written to. slots: int64 [n],
    distinct but for the last one, which stays at length 0. chain: int64 [n, count], the last token of each text and its
    drafts; outcomes: int64 [n, count], after each of these. Returns int64 [n, count + 1]: how many were accepted, then
    the outcomes.
    """
    if lengths.is_cuda:
        from distspec.kernels import rolling  # imports Triton

        return rolling.settle(lengths, last, slots, chain, outcomes)
    accepted = (chain[:, 1:] == outcomes[:, :-1]).to(torch.int64).cumprod(1).sum(1, keepdim=True)
    lengths[slots] += accepted[:, 0] + 1
    lengths[-1] = 0
    last[slots] = torch.cat((chain.gather(1, accepted), outcomes.gather(1, accepted)), 1)
    return torch.cat((accepted, outcomes), 1)


def make_up(integers: Tensor, tokens: Tensor, vocab: int, odds: float | None = None) -> Tensor:
    """What distspec.synthetic says follows each token: its outcome, or the first guess, which is right with `odds`.

    integers: as of Spread; tokens: int64 [rows], those before. Returns int64 [rows], in 0 .. vocab-1.
    """
    if tokens.is_cuda:
        from distspec.kernels import rolling  # imports Triton

        return rolling.make_up(integers, tokens, vocab, None if odds is None else below(odds))
    key = torch.zeros_like(tokens)
    for part in (*integers[:, 1:].unbind(1), tokens):
        key = _mix(key, part)
    right = _modulo(_mix(key, _OUTCOME), vocab)
    if odds is None:
        return right
    wrong = (right + 1 + _modulo(_mix(key, _WRONG), vocab - 1)) % vocab
    # Unsigned numbers compare as signed ones do with the first bit turned over.
    is_right = (_mix(key, _RANK) ^ -(2**63)) < below(odds) - 2**63
    return torch.where(is_right, right, wrong)


def below(odds: float) -> int:
    """How many 64-bit numbers, from 0 on, are below the share `odds` of all, as distspec.synthetic divides."""
    low, high = 0, 2**64 - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle / 2**64 < odds else (low, middle)
    return low


def _mix(state: Tensor, part: Tensor | int) -> Tensor:
    """As distspec.synthetic; int64 that stand for unsigned numbers."""
    return mix_(state + part + signed(STEP))


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _modulo(x: Tensor, size: int) -> Tensor:
    """x % size of unsigned x: of its upper bits, then with its last one."""
    return (_shifted(x, 1) % size * 2 + (x & 1)) % size
