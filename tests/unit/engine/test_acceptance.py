"""Leased rounds whose drafts are weighed, with every kind of drafter that has a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from msgspec.structs import replace

from distspec import config
from distspec.drafters import DflashDrafter, Drafter, EagleDrafter, StandaloneDrafter
from distspec.drafters.base import taps_of
from distspec.engine import Engine
from distspec.engine.acceptance import ACCEPTANCES
from distspec.models import prefix_layers
from distspec.models.dflash import Dflash
from distspec.protocol.messages import Lease, Progress
from distspec.protocol.values import SamplingParams, Shape
from distspec.rounds import Desk
from distspec.sampling import SamplingRows
from distspec.sampling.rejection import distribution
from tests.causal import logits
from tests.desks import CPU, Ticks, run, stream
from tests.featured import made, target
from tests.frequencies import SOUND, g_test
from tests.teacher import plain

PROMPT = (1, 2, 3, 4, 5, 1, 2)
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, frequency_penalty=0.4, prompt_tokens=len(PROMPT))
KINDS = ("standalone", "eagle", "eagle3", "mtp", "dflash")
SLOTS = 32
OPTIONS = config.Engine(page_size=4, num_pages=SLOTS * 16, max_num_seqs=SLOTS, max_scratch_nodes=16)


def drafter(kind: str, acceptance: str, options: config.Engine) -> Drafter:
    rule = ACCEPTANCES[acceptance]
    if kind == "standalone":
        of = Engine(prefix_layers(target(), 1), options, device=CPU, max_model_len=64, acceptance=rule)
        return StandaloneDrafter(of, max_num_batched_tokens=128, max_scratch_nodes=16, max_model_len=64)
    model = made(kind)
    if isinstance(model, Dflash):
        return DflashDrafter(model, options, max_model_len=64, device=CPU, acceptance=rule)
    return EagleDrafter(model, options, max_model_len=64, device=CPU, acceptance=rule)


def serve(
    kind: str, acceptance: str, requests: Sequence[SamplingParams], *, steps: int = 3, budget: int = 128, **options: int
) -> tuple[list[list[int]], int]:
    """The outputs of requests that run together, and how many drafts were accepted."""
    changed = replace(OPTIONS, **options)
    guesses = drafter(kind, acceptance, changed)
    judge = Engine(
        target(), changed, device=CPU, max_model_len=64, taps=taps_of(guesses), acceptance=ACCEPTANCES[acceptance]
    )
    desk = Desk(judge, guesses, max_num_batched_tokens=budget, clock=Ticks())
    for number, params in enumerate(requests):
        lease = Lease(request=number, epoch=1, start=0, tokens=PROMPT, shape=Shape(steps=steps), nodes=steps)
        desk.receive(replace(lease, params=params))
    replies = run(desk)
    accepted = sum(sum(reply.accepted) for reply in replies if isinstance(reply, Progress))
    return [stream(replies, number) for number in range(len(requests))], accepted


def seeds(count: int, params: SamplingParams = SAMPLED) -> list[SamplingParams]:
    return [replace(params, seed=seed) for seed in range(count)]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("acceptance", ["ratio", "block"])
def test_greedy_requests_say_what_they_say_anyway(acceptance: str, kind: str, steps: int) -> None:
    """Beside sampled ones, in rounds of one draft as of several."""
    outputs, _ = serve(kind, acceptance, [GREEDY, *seeds(2)], steps=steps)
    assert outputs[0] == plain(target(), PROMPT, GREEDY)[0]
    assert [len(output) for output in outputs] == [20] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("acceptance", ["ratio", "block"])
def test_a_seed_decides_an_output_whatever_runs_beside_it(acceptance: str, kind: str) -> None:
    together, accepted = serve(kind, acceptance, seeds(4))
    assert accepted > 4
    assert serve(kind, acceptance, seeds(4), page_size=1, num_pages=SLOTS * 64)[0] == together
    assert [serve(kind, acceptance, [params])[0][0] for params in seeds(4)] == together


@cache
def pairs(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The exact joint distribution of an output's second and third token."""
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        exact = {(*path, t): p * q for path, p in exact.items() for t, q in enumerate(after(path, params)) if q}
    found = dict.fromkeys((path[1:] for path in exact), 0.0)
    for path, p in exact.items():
        found[path[1:]] += p
    return found


def after(path: tuple[int, ...], params: SamplingParams) -> list[float]:
    rows = SamplingRows.of([params], [0], CPU)
    scores = logits(target(), [*PROMPT, *path])[-1:].clone()
    allowed = set(params.allowed_token_ids or range(scores.shape[1]))
    scores[:, [token for token in range(scores.shape[1]) if token not in allowed]] = -torch.inf
    law: list[float] = distribution(scores, rows)[0].tolist()
    return law


@pytest.mark.parametrize(("kind", "budget"), [*((kind, 128) for kind in KINDS), ("standalone", 9)])
@pytest.mark.parametrize("acceptance", ["ratio", "block"])
def test_what_is_drawn_is_distributed_as_the_target_says(acceptance: str, kind: str, budget: int) -> None:
    """Also where steps have so few rows that rounds are judged in parts."""
    params = SamplingParams(max_tokens=6, temperature=1.2, top_k=4)
    assert deviation(kind, acceptance, params, budget) < SOUND


@pytest.mark.parametrize(("kind", "known"), [("eagle3", 0), ("eagle3", 1), ("dflash, own head", 0)])
@pytest.mark.parametrize("acceptance", ["ratio", "block"])
def test_so_it_is_where_a_list_leaves_the_drafter_no_token(acceptance: str, kind: str, known: int) -> None:
    """Or only one, of the few that it knows: it guesses that, or nothing."""
    ids = made(kind).weights["ids"].tolist()
    unknown = [token for token in range(made(kind).config.vocab_size) if token not in ids]
    allowed = (*unknown[:3], *ids[:known])
    params = SamplingParams(max_tokens=6, temperature=1.2, allowed_token_ids=allowed)
    outputs, accepted = serve(kind, acceptance, seeds(4, params))
    assert set().union(*outputs) <= set(allowed)
    assert bool(accepted) == bool(known)
    assert deviation(kind, acceptance, params) < SOUND


def deviation(kind: str, acceptance: str, params: SamplingParams, budget: int = 128) -> float:
    """How much farther outputs of 256 seeds are from the exact distribution than chance has them, in its deviations."""
    seen: Counter[tuple[int, ...]] = Counter()
    for first in range(0, 256, SLOTS):
        outputs, _ = serve(kind, acceptance, [replace(params, seed=first + i) for i in range(SLOTS)], budget=budget)
        seen.update(tuple(output[1:3]) for output in outputs)
    return g_test(seen, pairs(params))
