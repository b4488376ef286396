"""From logits to tokens: temperature, truncation, Gumbel-max.

Knows logits and the sampling parameters of each row. Does not know models, requests or nodes: a row is judged
by itself, so its token depends neither on its neighbours nor on their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from distspec.copies import integers, numbers
from distspec.protocol.values import SamplingParams
from distspec.sampling.noise import gumbel, signed

if TYPE_CHECKING:
    from distspec.kernels.truncate import Kept

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: scaled logits would leave nothing of the noise in float32 anyway."""

_NUCLEUS_GUESS = 1024
"""A nucleus is nearly always within this many tokens, and finding these is much cheaper than a full sort."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters, one entry per row, on the device of the logits.

    reals: float32 [rows, 3]: temperature, top_p, min_p. integers: int64 [rows, 4]: top_k, seed, choice, and the
    position of the token to be drawn. The rest is known on the host, so that work nobody asked for is never
    launched. sampled: rows that are not greedy; max_top_k, any_top_p, any_min_p, least_top_p: over these rows, and 0
    where it is not known.
    """

    reals: Tensor
    integers: Tensor
    sampled: tuple[int, ...]
    max_top_k: int
    any_top_p: bool
    any_min_p: bool
    least_top_p: float = 0.0

    @classmethod
    def of(cls, params: Sequence[SamplingParams], positions: Sequence[int], device: torch.device) -> SamplingRows:
        """One row per entry of `params`, which draws the token at the absolute position beside it."""
        reals = [value for p in params for value in (p.temperature, p.top_p, p.min_p)]
        each = zip(params, positions, strict=True)
        keys = [value for p, at in each for value in (p.top_k, signed(p.seed), p.choice, at)]
        whole, real = numbers(keys, reals, device)
        sampled = tuple(row for row, p in enumerate(params) if p.temperature >= GREEDY_BELOW)
        return cls(
            real.view(-1, 3),
            whole.view(-1, 4),
            sampled=sampled,
            max_top_k=max((params[row].top_k for row in sampled), default=0),
            any_top_p=any(params[row].top_p < 1 for row in sampled),
            any_min_p=any(params[row].min_p > 0 for row in sampled),
            least_top_p=min((params[row].top_p for row in sampled), default=1.0),
        )

    def select(self, index: Sequence[int]) -> SamplingRows:
        """Some of the rows, in this order."""
        at = integers(index, self.reals.device)
        known = set(self.sampled)
        sampled = tuple(i for i, row in enumerate(index) if row in known)
        return replace(self, reals=self.reals[at], integers=self.integers[at], sampled=sampled)

    @property
    def truncated(self) -> bool:
        """Some row allows fewer tokens than there are."""
        return bool(self.max_top_k) or self.any_top_p or self.any_min_p

    @property
    def temperature(self) -> Tensor:
        return self.reals[:, 0]

    @property
    def top_p(self) -> Tensor:
        return self.reals[:, 1]

    @property
    def min_p(self) -> Tensor:
        return self.reals[:, 2]

    @property
    def top_k(self) -> Tensor:
        return self.integers[:, 0]

    @property
    def seed(self) -> Tensor:
        return self.integers[:, 1]

    @property
    def choice(self) -> Tensor:
        return self.integers[:, 2]

    @property
    def position(self) -> Tensor:
        return self.integers[:, 3]


def draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The token of each row: argmax of log p + G, which is a draw from p (Gumbel-max).

    logits: float32 [rows, vocab], unprocessed. Returns int64 [rows]. p is softmax(logits / temperature),
    truncated by top_k, then top_p, then min_p. Greedy rows take the argmax of the logits.
    The same keys and logits give the same token on every worker (drafter-invariant coupling,
    arXiv 2408.07978).
    """
    if logits.is_cuda:
        return _draw_fused(logits, rows)
    if not rows.sampled:
        return logits.argmax(dim=-1)
    return _perturbed(logits, rows).argmax(dim=-1)


def _draw_fused(logits: Tensor, rows: SamplingRows) -> Tensor:
    """As `draw`, with no noise or order of tokens in memory, and nothing that the host must wait for."""
    from distspec.kernels.nucleus import draw_nucleus, suits  # imports Triton
    from distspec.kernels.sample import draw_whole

    if rows.any_top_p and not rows.max_top_k and suits(rows.least_top_p):
        return draw_nucleus(logits, rows.temperature, rows.integers[:, 1:], rows.top_p, rows.min_p, GREEDY_BELOW)
    stays = stay(logits, rows) if rows.truncated else None
    return draw_whole(logits, rows.temperature, rows.integers[:, 1:], GREEDY_BELOW, stays)


def stay(logits: Tensor, rows: SamplingRows) -> Kept:
    """What the limits of rows let stay, on CUDA."""
    from distspec.kernels.truncate import Limits, kept  # imports Triton

    limits = Limits(rows.top_k, rows.top_p, rows.min_p, bool(rows.max_top_k), rows.any_top_p)
    return kept(logits, rows.temperature, limits, GREEDY_BELOW)


def best(logits: Tensor, rows: SamplingRows, most: int) -> tuple[Tensor, Tensor]:
    """The tokens that a drafter takes for likeliest to be drawn, the best first: the first is what `draw` gives.

    Arguments as `draw`; most <= vocab. Returns tokens int64 [rows, most] and scores float32 [rows, most]: their
    logarithmic share of the perturbed scores log q + G, since a target that draws with the same noise differs only in
    its log p. What truncation forbids follows, by probability: the target's own truncation may allow it.
    """
    if logits.is_cuda and not rows.truncated:
        from distspec.kernels.best import MOST, best_whole  # imports Triton

        if most <= MOST:
            return best_whole(logits, rows.temperature, rows.integers[:, 1:], GREEDY_BELOW, most)
    scores = _perturbed(logits, rows)
    if rows.truncated:
        scores = _append_forbidden(scores, logits, rows)
    top = torch.log_softmax(scores, dim=-1).topk(most, dim=-1)
    return top.indices, top.values


def _append_forbidden(scores: Tensor, logits: Tensor, rows: SamplingRows) -> Tensor:
    """float32 [rows, vocab]: `scores` with finite ones, a clear step below the others, in place of -inf."""
    forbidden = scores == -torch.inf
    rest = logits / rows.temperature.clamp(min=GREEDY_BELOW)[:, None]
    last = scores.masked_fill(forbidden, torch.inf).amin(dim=-1)
    first = rest.masked_fill(~forbidden, -torch.inf).amax(dim=-1)
    return torch.where(forbidden, rest + (last - first - 1).clamp(max=0)[:, None], scores)


def process(logits: Tensor, rows: SamplingRows) -> Tensor:
    """log p up to a constant per row: scaled by temperature, -inf where truncated.

    logits: float32 [rows, vocab]; no row may be greedy. At least the likeliest token stays; tokens as likely
    as the last one that stays, stay too, so that no order of sorting can matter.
    """
    scaled = logits / rows.temperature[:, None]
    if rows.max_top_k:
        _truncate_(scaled, _top_k_bound(scaled, rows))
    if rows.any_top_p:
        _truncate_(scaled, _top_p_bound(scaled, rows))
    if rows.any_min_p:
        _truncate_(scaled, scaled.amax(dim=-1) + rows.min_p.log())
    return scaled


def _perturbed(logits: Tensor, rows: SamplingRows) -> Tensor:
    """float32 [rows, vocab]: log p + G of sampled rows, logits of greedy ones."""
    if not rows.sampled:
        return logits
    if len(rows.sampled) == logits.shape[0]:
        return _noisy(logits, rows)
    some = integers(rows.sampled, logits.device)
    scores = logits.clone()
    scores[some] = _noisy(logits[some], rows.select(rows.sampled))
    return scores


def _noisy(logits: Tensor, rows: SamplingRows) -> Tensor:
    noise = gumbel(rows.seed, rows.choice, rows.position, logits.shape[1])
    return noise.add_(process(logits, rows))


def _truncate_(scaled: Tensor, bound: Tensor) -> None:
    scaled.masked_fill_(scaled < bound[:, None], -torch.inf)


def _top_k_bound(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """float32 [rows]: the k-th best logit; -inf where top_k is off."""
    width = min(scaled.shape[1], rows.max_top_k)
    best = scaled.topk(width, dim=-1).values
    last = best.gather(1, (rows.top_k.clamp(1, width) - 1)[:, None])[:, 0]
    return torch.where(rows.top_k > 0, last, -torch.inf)


def _top_p_bound(scaled: Tensor, rows: SamplingRows) -> Tensor:
    """float32 [rows]: the least logit before which less than top_p of the mass lies; -inf where top_p is off."""
    vocab = scaled.shape[1]
    active = rows.top_p < 1
    top = scaled.amax(dim=-1, keepdim=True)
    enough = rows.top_p[:, None] * (scaled - top).exp_().sum(dim=-1, keepdim=True).double()
    # Whether the guess was wide enough is only known on the device, and a GPU must not wait to hear it.
    width = vocab if scaled.is_cuda else min(vocab, _NUCLEUS_GUESS)
    while True:
        best = scaled.topk(width, dim=-1).values
        weight = (best - top).exp_()
        # Near top_p = 1 many tokens weigh little: a sum in float32 would misplace a millionth of the mass.
        inside = weight.cumsum(dim=-1, dtype=torch.float64) - weight < enough
        if width == vocab or not bool((inside[:, -1] & active).any()):
            break
        width = vocab
    last = best.gather(1, inside.sum(dim=-1, keepdim=True).clamp(min=1) - 1)[:, 0]
    return torch.where(active, last, -torch.inf)
