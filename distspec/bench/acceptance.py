"""How many drafts each rule of acceptance keeps, of the same target and drafter: coupled, ratio, block.

Knows engines, rules and how to count. Does not know time: what a kept draft is worth, benches of rounds say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import mean, pstdev

import torch
from msgspec import structs

from distspec import config, models
from distspec.bench.prompts import CHAT, encoded
from distspec.bench.report import Context, Row, machine
from distspec.drafters import StandaloneDrafter
from distspec.engine import Engine
from distspec.engine.acceptance import ACCEPTANCES
from distspec.errors import ConfigError, InvalidValue
from distspec.models.llama import Llama, prefix_layers
from distspec.protocol.messages import Lease, Progress
from distspec.protocol.values import SamplingParams, Shape
from distspec.rounds import Desk
from distspec.sampling import SamplingRows, best, draw
from distspec.sampling.rejection import Chain, Drafts, block, judge, propose, ratio

FIGURES = {"first kept": "first", "+-": "error"}
"""Columns beside the drafts that are kept of a round: how often its first one is, and the mean's standard error."""

CPU = torch.device("cpu")
_RULES = {"ratio": ratio, "block": block}


@dataclass(slots=True)
class Counts:
    """kept: drafts of each round."""

    kept: list[int] = field(default_factory=list)

    def row(self, name: str, coupled: Counts, context: Context) -> Row:
        value, reference = mean(self.kept), mean(coupled.kept)
        error = pstdev(self.kept) / len(self.kept) ** 0.5
        figures = {"first": mean(kept > 0 for kept in self.kept), "error": error, "rounds": len(self.kept)}
        return Row(name, value, "drafts", reference, value / reference, {**context, **figures})


# -- random distributions ------------------------------------------------------------------------------


def synthetic(distances: Sequence[float], steps: int, rounds: int, vocab: int = 1000) -> list[Row]:
    """The target's logits are normal with a deviation of 2, the drafter's are these and so much noise beside; every
    text has distributions of its own. Rows acceptance/synthetic/{distance}/{rule}."""
    found = []
    for distance in distances:
        counts = {rule: _random_rounds(rule, distance, steps, rounds, vocab) for rule in ACCEPTANCES}
        context = machine("torch") | {"vocab": vocab, "steps": steps, "overlap": _overlap(distance, vocab)}
        found += [
            one.row(f"acceptance/synthetic/{distance}/{rule}", counts["coupled"], context)
            for rule, one in counts.items()
        ]
    return found


def _random_rounds(rule: str, distance: float, steps: int, rounds: int, vocab: int) -> Counts:
    """Every round has a seed of its own, and so has the chain that is drafted in it."""
    counts = Counts()
    for first in range(0, rounds, 100):
        seeds = range(first, min(first + 100, rounds))
        theirs, ours = _logits(first, distance, (len(seeds), steps + 1, vocab))
        params = [SamplingParams(max_tokens=1, seed=seed) for seed in seeds for _ in range(steps + 1)]
        rows = SamplingRows.of(params, [*range(steps + 1)] * len(seeds), CPU)
        if rule == "coupled":
            drafted = best(theirs.flatten(0, 1), rows, 1)[0].view(len(seeds), -1)
            outcomes = draw(ours.flatten(0, 1), rows)
        else:
            tokens, laws = propose(theirs.flatten(0, 1), rows, [0] * len(params))
            drafted, laws = tokens.view(len(seeds), -1), laws.view(theirs.shape)
            chains = [
                Chain(i * (steps + 1), drafted[i, :steps].tolist(), list(laws[i, :steps])) for i in range(len(seeds))
            ]
            outcomes = judge(ours.flatten(0, 1), rows, Drafts.of(chains), _RULES[rule])
        right = (outcomes.view(len(seeds), -1) == drafted)[:, :steps]
        counts.kept += right.long().cumprod(dim=1).sum(dim=1).tolist()
    return counts


def _logits(seed: int, distance: float, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the drafter and the target."""
    generator = torch.Generator().manual_seed(seed)
    ours = torch.randn(shape, generator=generator) * 2
    return ours + torch.randn(shape, generator=generator) * distance, ours


def _overlap(distance: float, vocab: int) -> float:
    """What `ratio` keeps of first drafts in the long run: the sum of min(p, q)."""
    theirs, ours = _logits(0, distance, (400, vocab))
    return float(torch.minimum(theirs.softmax(-1), ours.softmax(-1)).sum(-1).mean())


# -- models --------------------------------------------------------------------------------------------


def measure(
    name: str, layers: int, temperatures: Sequence[float], top_p: float, steps: int, requests: int, tokens: int
) -> list[Row]:
    """Chat prompts, answered in leased rounds with the first `layers` of the target for a drafter, in fp32 on the CPU.
    Rows acceptance/{model}/t{temperature}/{rule}. Raises ModelNotFound, ConfigError, InvalidValue."""
    target = models.load_model(name, dtype=torch.float32, device=CPU)
    if not isinstance(target, Llama) or not 0 < layers < target.config.num_layers:
        raise ConfigError("layers", f"{name} cannot be drafted for by its first {layers} layers")
    if tokens < steps + 2:
        raise InvalidValue("tokens", tokens, f">= {steps + 2}, a prefill's and a round's")
    prompts = encoded(name, CHAT)
    asked = [prompts[i % len(prompts)] for i in range(requests)]
    context = machine("torch") | {"layers": layers, "top_p": top_p, "steps": steps}
    context |= {"requests": requests, "tokens": tokens}
    found = []
    for temperature in temperatures:
        params = SamplingParams(max_tokens=tokens, temperature=temperature, top_p=top_p)
        counts = {rule: Counts(list(rounds_of(rule, target, layers, asked, params, steps))) for rule in ACCEPTANCES}
        found += [
            one.row(f"acceptance/{name}/t{temperature}/{rule}", counts["coupled"], context)
            for rule, one in counts.items()
        ]
    return found


def rounds_of(
    rule: str, target: Llama, layers: int, prompts: Sequence[list[int]], params: SamplingParams, steps: int
) -> Iterator[int]:
    """Drafts kept in each round that had as many as a round can have; each prompt has a seed of its own."""
    longest = max(map(len, prompts)) + params.max_tokens + steps
    options = config.Engine(max_num_seqs=len(prompts), max_scratch_nodes=steps, prefix_cache=False)
    options = structs.replace(options, num_pages=options.pages_for(longest) * len(prompts))
    engines = [
        Engine(model, options, device=CPU, max_model_len=longest, acceptance=ACCEPTANCES[rule])
        for model in (target, prefix_layers(target, layers))
    ]
    budget = options.max_num_batched_tokens
    drafter = StandaloneDrafter(
        engines[1], max_num_batched_tokens=budget, max_scratch_nodes=steps, max_model_len=longest
    )
    desk = Desk(engines[0], drafter, max_num_batched_tokens=budget, clock=lambda: 0.0)
    for i, prompt in enumerate(prompts):
        resolved = structs.replace(params, seed=i, prompt_tokens=len(prompt))
        shape = Shape(steps=steps)
        desk.receive(
            Lease(request=i, epoch=1, start=0, tokens=tuple(prompt), shape=shape, nodes=steps, params=resolved)
        )
    while desk.ready():
        for reply in desk.step():
            if isinstance(reply, Progress):
                yield from (k for d, k in zip(reply.drafted, reply.accepted, strict=True) if d == steps)
