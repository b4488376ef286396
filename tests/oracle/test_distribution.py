"""What is drawn has the target's distribution, under every policy: G-tests over a vocabulary of 8.

Each sample is a whole request of three tokens with a seed of its own, served by a fleet of real engines (see
tests/fleet.py). The exact joint distribution is computed from dense forwards. A test that never fails would prove
nothing, so faults are planted, and must be found; one that must not matter, in the drafter, must not.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from random import Random

import pytest
import torch
from msgspec.structs import replace

from distspec import config
from distspec.coordinator import driving
from distspec.coordinator.context import Settings
from distspec.coordinator.request import Request
from distspec.drafters import StandaloneDrafter
from distspec.engine import Engine
from distspec.models import prefix_layers, random_model
from distspec.models.llama import Llama
from distspec.protocol.messages import Hello, Verdict
from distspec.protocol.values import ROOT, SamplingParams
from distspec.rounds import Desk
from distspec.sampling import SamplingRows, process
from distspec.speculation.policies import POLICIES
from distspec.workers.compute import Later, Work
from distspec.workers.draft import DraftWork
from distspec.workers.target import TargetWork
from tests.causal import logits
from tests.desks import Ticks
from tests.fleet import Fleet
from tests.shapes import TINY
from tests.wire import Port

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SHAPE = dataclasses.replace(TINY, vocab_size=8, max_position=64)
PROMPT = (3, 1, 4, 1, 5)
PARAMS = SamplingParams(max_tokens=3, temperature=0.9, top_p=0.92)
SAMPLES = 600
AT_ONCE = 60
SOUND, FAULTY = 4.0, 5.0
"""Standard deviations: a sound sampler stays within the first, a planted fault is beyond the second."""


@cache
def target() -> Llama:
    return random_model(SHAPE, seed=7, dtype=torch.float32, device=CPU)


@cache
def joint() -> dict[tuple[int, ...], float]:
    """The exact probability of every output."""
    tokens = range(SHAPE.vocab_size)
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(PARAMS.max_tokens):
        exact = {(*path, t): p * after(path)[t] for path, p in exact.items() for t in tokens}
    return exact


@cache
def after(path: tuple[int, ...]) -> list[float]:
    """The processed distribution of the next token."""
    rows = SamplingRows.of([PARAMS], [0], CPU)
    probabilities: list[float] = process(logits(target(), [*PROMPT, *path])[-1:], rows).softmax(-1)[0].tolist()
    return probabilities


def build(role: str, port: Port, later: Callable[[Later], None]) -> tuple[Work, Hello]:
    hello = Hello(
        worker="",
        role="",
        incarnation=0,
        fingerprint={},
        slots=64,
        capacity=10**6,
        page_size=4,
        max_model_len=SHAPE.max_position,
        vocab_size=SHAPE.vocab_size,
        drafts=role == "draft",
    )
    options = config.Engine(page_size=4, num_pages=64 * 8, max_num_seqs=64, max_scratch_nodes=16)
    model = prefix_layers(target(), 1) if role == "draft" else target()
    engine = Engine(model, options, device=CPU)
    if role == "draft":
        drafter = StandaloneDrafter(engine, max_num_batched_tokens=256, max_scratch_nodes=16, max_model_len=64)
        return DraftWork(drafter, Ticks()), hello
    desk = Desk(engine, None, max_num_batched_tokens=256, clock=Ticks())
    return TargetWork(engine, desk, port, later), hello


def deviation(policy: str, samples: int = SAMPLES) -> float:
    """How far the outputs of so many seeds, other ones for each policy, are from the exact joint distribution, in
    standard deviations."""
    settings = Settings(policy=policy, steps=2, topk=2, nodes=4, lookahead=1, live=12, early=2, room=16)
    seen: Counter[tuple[int, ...]] = Counter()
    begin = list(POLICIES).index(policy) * SAMPLES
    for first in range(begin, begin + samples, AT_ONCE):
        fleet = Fleet(["decode", "verify", "draft"], settings, build, seed=first)
        for seed in range(first, first + AT_ONCE):
            fleet.submit(str(seed), PROMPT, replace(PARAMS, seed=seed))
        fleet.run(turns=100_000)
        seen.update(tuple(stream.tokens) for stream in fleet.streams.values())
    return g_test(seen, joint())


def g_test(seen: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """Sokal & Rohlf's G with rare cells pooled, as a normal deviate (Wilson & Hilferty 1931)."""
    total = seen.total()
    cells = [(seen[path], total * p) for path, p in exact.items() if total * p >= 5]
    rest = total - sum(o for o, _ in cells), total - sum(e for _, e in cells)
    cells += [rest] if rest[1] > 0 else []
    g: float = 2 * sum(o * math.log(o / e) for o, e in cells if o)
    free = len(cells) - 1
    deviate: float = ((g / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    return deviate


@pytest.mark.parametrize("policy", POLICIES)
def test_the_joint_of_three_tokens_is_the_targets(policy: str) -> None:
    assert abs(deviation(policy)) < SOUND


@pytest.mark.parametrize(("factor", "is_found"), [(1.0, False), (2.0, True)])
def test_the_test_itself_has_power(factor: float, is_found: bool) -> None:
    """Draws from the distribution itself pass, and those with a likeliest output twice as likely do not."""
    exact = joint()
    best = max(exact, key=lambda path: exact[path])
    weights = [p * (factor if path == best else 1) for path, p in exact.items()]
    drawn = Counter(Random(1).choices(list(exact), weights, k=4 * SAMPLES))
    assert (abs(g_test(drawn, exact)) > SOUND) == is_found


@pytest.mark.parametrize("policy", ["sd", "bvsp"])
def test_a_noise_key_that_is_used_twice_is_found(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = SamplingRows.of

    def reused(params: list[SamplingParams], positions: list[int], device: torch.device) -> SamplingRows:
        return of(params, [0] * len(positions), device)

    monkeypatch.setattr(SamplingRows, "of", reused)
    assert deviation(policy, SAMPLES // 2) > FAULTY


@pytest.mark.parametrize("policy", ["sd", "dsi", "ssd"])
def test_an_outcome_of_the_wrong_parent_is_found(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = driving.verdict

    def shifted(request: object, message: Verdict) -> bool:
        drawn = [token for _, token in message.outcomes]
        nodes = [node for node, _ in message.outcomes]
        turned = tuple(zip(nodes, drawn[1:] + drawn[:1], strict=True))
        return verdict(request, replace(message, outcomes=turned))  # type: ignore[arg-type]

    monkeypatch.setattr(driving, "verdict", shifted)
    assert deviation(policy) > FAULTY


@pytest.mark.parametrize("policy", ["sd", "ssd"])
def test_a_node_that_is_taken_without_being_judged_is_found(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's best guess below the root passes for the outcome."""
    verdict = driving.verdict

    def skipped(request: Request, message: Verdict) -> bool:
        children = request.tree.nodes[request.tree.root].children
        if not children:
            return verdict(request, message)
        token = next(iter(children))
        outcomes = tuple((node, token if node == ROOT else drawn) for node, drawn in message.outcomes)
        return verdict(request, replace(message, outcomes=outcomes))

    monkeypatch.setattr(driving, "verdict", skipped)
    assert deviation(policy) > FAULTY


def test_a_drafter_without_top_p_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only how often it is right."""

    def outputs() -> dict[str, list[int]]:
        fleet = Fleet(["decode", "draft"], Settings(policy="sd", steps=2), build, seed=1)
        for seed in range(AT_ONCE):
            fleet.submit(str(seed), PROMPT, replace(PARAMS, seed=seed))
        fleet.run(turns=100_000)
        return {key: stream.tokens for key, stream in fleet.streams.items()}

    right, guess = outputs(), Engine.guess

    def loose(self: Engine, segments: object, most: int) -> object:
        for slot, known in self._open.items():
            self._open[slot] = dataclasses.replace(known, params=replace(known.params, top_p=1.0))
        return guess(self, segments, most)  # type: ignore[arg-type]

    monkeypatch.setattr(Engine, "guess", loose)
    assert outputs() == right


def test_every_output_has_its_probability() -> None:
    exact = joint()
    assert len(exact) == len(list(product(range(8), repeat=3)))
    assert sum(exact.values()) == pytest.approx(1)
