"""Rejection sampling: which of the tokens that a drafter drew are kept, so that what is kept, or drawn in their place,
has the target's distribution.

Knows distributions, chains of drafts, and the keys of noise. Does not know models, requests, or who drafted.

A chain is drawn from the drafter's distributions q, each given the drafts before it, and judged by the target's p at
the same places. Outcomes come out as they do from `draw`: the outcome before a draft that is kept is the draft itself,
so whoever walks along a chain for as long as outcomes and drafts agree stops at the right place.

Chances that decide must be independent of what they decide on, so drafts, coins and outcomes each have noise of their
own. And since block verification looks at a whole chain before it gives up the end of it, what is drafted for the same
places later must not be drawn with the noise that was looked at: noise begins anew with every chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from distspec.copies import integers, to_device
from distspec.sampling.draw import GREEDY_BELOW, SamplingRows, draw
from distspec.sampling.logprobs import processed
from distspec.sampling.noise import apart, gumbel, uniform

_DRAFTS, _COINS = 1, 2
"""Streams of noise; what is drawn in the place of a draft has the one of `draw`."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Drafts in the order in which they were drawn. row: that judges the first of them; the next row judges the second,
    and so on. laws: float32 [vocab] each, what it was drawn from; a law may end early, where all is 0."""

    row: int
    tokens: Sequence[int]
    laws: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Chains, one after the other, n drafts in all. The rest on the device of the laws.

    rows: that judge them. tokens: int64 [n]. laws: float32 [n, any]. chain, depth: int64 [n], which chain, and how many
    drafts of it come before. is_last: bool [n], none comes after. chains, steps: how many, and the most drafts of one.
    """

    rows: tuple[int, ...]
    tokens: Tensor
    laws: Tensor
    chain: Tensor
    depth: Tensor
    is_last: Tensor
    chains: int
    steps: int

    @classmethod
    def of(cls, chains: Sequence[Chain]) -> Drafts:
        """Raises ValueError without any draft."""
        if not any(chain.tokens for chain in chains):
            raise ValueError("no drafts")
        laws = torch.stack([law for chain in chains for law in chain.laws])
        places = [(i, depth) for i, chain in enumerate(chains) for depth in range(len(chain.tokens))]
        columns = [
            (token, i, depth, depth + 1 == len(chains[i].tokens))
            for (i, depth), token in zip(places, (t for chain in chains for t in chain.tokens), strict=True)
        ]
        numbers = to_device(torch.tensor(columns, dtype=torch.int64), laws.device)
        return cls(
            rows=tuple(chains[i].row + depth for i, depth in places),
            tokens=numbers[:, 0],
            laws=laws,
            chain=numbers[:, 1],
            depth=numbers[:, 2],
            is_last=numbers[:, 3].bool(),
            chains=len(chains),
            steps=max(len(chain.tokens) for chain in chains),
        )


class Rule(Protocol):
    def __call__(self, p: Tensor, q: Tensor, coins: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
        """p, q: float32 [n, vocab], of the target and the drafter; coins: float32 [n], uniform in (0, 1).

        Returns bool [n], the drafts that are kept, and float32 [n, vocab], >= 0: what the token in the place of each is
        drawn in proportion to, if it is the first that is not.
        """
        ...


def ratio(p: Tensor, q: Tensor, coins: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
    """Each draft for itself, with chance min(1, p / q), else one by what p has more than q (Leviathan et al., arXiv
    2211.17192; Chen et al., arXiv 2302.01318). See Rule."""
    return coins < _ratios(p, q, drafts), (p - q).clamp_(min=0)


def block(p: Tensor, q: Tensor, coins: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
    """The longest beginning of a chain that passes, judged as a whole (Sun et al., arXiv 2403.10444, algorithm 2): on
    average as many drafts as `ratio` keeps, or more. See Rule."""
    chain, depth = drafts.chain, drafts.depth
    # How much likelier the target takes each beginning to be than the drafter, cut off at 1 on the way.
    worth = p.new_ones(drafts.chains, drafts.steps + 1)
    worth[chain, depth + 1] = _ratios(p, q, drafts)
    for i in range(drafts.steps):
        worth[:, i + 1] = (worth[:, i] * worth[:, i + 1]).clamp(max=1)
    rest = (worth[chain, depth, None] * p - q).clamp_(min=0)
    after, left = worth[chain, depth + 1], rest.sum(dim=-1).roll(-1)
    # 0 / 0: the target and the drafter agree about what follows, so all of it will be kept.
    chance = torch.where(drafts.is_last, after, (left / (left + 1 - after)).nan_to_num(1.0))
    passes = torch.zeros(drafts.chains, drafts.steps, dtype=torch.int64, device=p.device)
    passes[chain, depth] = (coins < chance).long()
    kept = passes.flip(1).cummax(dim=1).values.flip(1)
    return kept[chain, depth].bool(), rest


def _ratios(p: Tensor, q: Tensor, drafts: Drafts) -> Tensor:
    """float32 [n], finite: p / q of each draft; 0 where it can not have been drawn from q, so that it is refused."""
    p, q = (law.gather(1, drafts.tokens[:, None])[:, 0] for law in (p, q))
    return torch.where(q > 0, p / q, 0.0).clamp_(max=torch.finfo(p.dtype).max)


def judge(logits: Tensor, rows: SamplingRows, drafts: Drafts, rule: Rule) -> Tensor:
    """The outcome after each row: drafts that are kept, what is drawn in the place of others, and as `draw` where there
    are none. Of a row that judges a draft whose chain was left before, it means nothing.

    logits: float32 [rows, vocab]. Returns int64 [rows]. With `drafts` from `propose` of the same seed and choice, what
    a walk meets is distributed as p alone says; in greedy rows it is what `draw` gives.
    """
    found = draw(logits, rows)
    some = rows.select(drafts.rows)
    at = integers(drafts.rows, logits.device)
    p = distribution(logits[at], some)
    q = F.pad(drafts.laws, (0, p.shape[1] - drafts.laws.shape[1]))
    choice, position = apart(some.choice, some.position, _COINS, some.position - drafts.depth)
    coins = uniform(some.seed, choice, position, 1)[:, 0]
    kept, rest = rule(p, q, coins, drafts)
    # Rounding alone can leave nothing to draw from where a draft was refused that was hardly less likely than drafted.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)
    noise = gumbel(some.seed, some.choice, some.position, logits.shape[1])
    found[at] = torch.where(kept, drafts.tokens, noise.add_(rest.log()).argmax(dim=-1))
    return found


def propose(logits: Tensor, rows: SamplingRows, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """A draft after each row, drawn with noise that the target does not use.

    logits: float32 [rows, vocab], of the drafter. lengths: of the committed texts below which they hang; drafts of one
    place after another length are drawn anew. Returns tokens int64 [rows] and laws float32 [rows, vocab]. Where nothing
    is allowed, as of a drafter that knows none of the tokens that a mask leaves, the law is 0, the token means nothing.
    """
    laws = distribution(logits, rows)
    start = integers(lengths, logits.device)
    choice, position = apart(rows.choice, rows.position, _DRAFTS, start)
    noise = gumbel(rows.seed, choice, position, logits.shape[1])
    return noise.add_(laws.log()).argmax(dim=-1), laws


def distribution(logits: Tensor, rows: SamplingRows) -> Tensor:
    """float32 [rows, vocab]: what `draw` draws from. Of a greedy row all lies on one token, and 0 everywhere if all
    logits are -inf."""
    likeliest = logits.argmax(dim=-1)
    nothing = logits.gather(1, likeliest[:, None]) == -torch.inf
    laws = processed(logits, rows, likeliest).softmax(dim=-1)
    if len(rows.sampled) < len(logits):
        is_greedy = rows.temperature < GREEDY_BELOW
        laws = torch.where(is_greedy[:, None], F.one_hot(likeliest, logits.shape[1]).to(laws.dtype), laws)
    return laws.masked_fill_(nothing, 0.0)
