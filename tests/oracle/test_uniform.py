"""What the default model answers under speculation is distributed as the model says: a uniformity test.

Take the distribution of the next token that the plain target has after each prefix, with tokens in any order that
the prefix alone decides. The share of what comes before the token that was drawn, smoothed within the token's own, is
uniform on (0, 1) if and only if tokens are drawn from their distributions (Rosenblatt 1952; randomized, as tokens are
discrete). Here tokens that the output had before come first: those are what a noise key that is used twice prefers.
Then the likeliest, so that what the target would never have said is found at the end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import cache
from random import Random

import pytest
import torch
from msgspec.structs import replace

from distspec import config, models
from distspec.drafters import Drafter, DraftRow, Proposal, StandaloneDrafter
from distspec.engine import Engine, Outcome, Segment
from distspec.models.llama import Llama
from distspec.protocol.messages import Lease, Progress
from distspec.protocol.values import ROOT, SamplingParams, Shape
from distspec.rounds import Desk
from distspec.sampling import SamplingRows, process
from tests.causal import logits
from tests.desks import Ticks

pytestmark = pytest.mark.needs("model")

CPU = torch.device("cpu")
LONGEST = 64
PARAMS = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9)
SHAPE = Shape(steps=2, topk=2, width=1, nodes=4)
TEXTS = (
    "Once upon a time",
    "Dear Sir or Madam,",
    "The river rose slowly through the night and",
    "My favourite food is",
)
REQUESTS = 12
BOUND = 1.95
"""Of sqrt(n) D: one sound sampler in a thousand is beyond it. Seeds are fixed, so this one is or is not: it stays at
half of it, and the planted faults are beyond."""


@cache
def target() -> Llama:
    loaded = models.load_model("smollm2-135m", dtype=torch.float32, device=CPU)
    assert isinstance(loaded, Llama)
    return loaded


@cache
def prompts() -> list[tuple[int, ...]]:
    tokenizer = models.load_tokenizer("smollm2-135m")
    return [tuple(tokenizer.encode(text)) for text in TEXTS]


class Loose:
    """Drafts as if there were no top-p and the temperature were higher: often right, and often not."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        loose = [dataclasses.replace(row, params=replace(row.params, top_p=1.0, temperature=1.5)) for row in rows]
        return self._inner.propose(loose)

    def forget(self, request: int) -> None:
        self._inner.forget(request)

    def check(self) -> None:
        self._inner.check()


def engine() -> Engine:
    options = config.Engine(num_pages=REQUESTS * 8, max_num_seqs=REQUESTS, max_scratch_nodes=16)
    return Engine(target(), options, device=CPU, max_model_len=LONGEST)


Answer = tuple[tuple[int, ...], list[int]]
"""A prompt and what followed."""


def serve(requests: int) -> tuple[list[Answer], int]:
    """Answers of leased rounds over trees that the target's own model drafts, and how many drafts were accepted."""
    drafter = StandaloneDrafter(engine(), max_num_batched_tokens=512, max_scratch_nodes=16, max_model_len=LONGEST)
    desk = Desk(engine(), Loose(drafter), max_num_batched_tokens=512, clock=Ticks())
    answers: list[Answer] = [(prompts()[i % len(TEXTS)], []) for i in range(requests)]
    for i, (prompt, _) in enumerate(answers):
        params = replace(PARAMS, seed=i)
        desk.receive(Lease(request=i, epoch=1, start=0, tokens=prompt, shape=SHAPE, nodes=SHAPE.nodes, params=params))
    accepted = 0
    while desk.ready():
        for reply in desk.step():
            assert isinstance(reply, Progress)
            answers[reply.request][1].extend(reply.tokens)
            accepted += sum(reply.accepted)
    return answers, accepted


@torch.inference_mode()
def shares(prompt: Sequence[int], tokens: Sequence[int], random: Random) -> Iterator[float]:
    """Of an output's tokens, what of their distributions comes before them."""
    scores = logits(target(), [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    rows = SamplingRows.of([PARAMS] * len(tokens), [0] * len(tokens), CPU)
    probabilities = process(scores, rows).double().softmax(-1)
    for i, token in enumerate(tokens):
        own = probabilities[i, token]
        is_said = torch.zeros_like(probabilities[i], dtype=torch.bool)
        is_said[list(tokens[:i])] = True
        likelier = probabilities[i] > own
        before = is_said & likelier if is_said[token] else is_said | likelier
        yield float(probabilities[i][before].sum() + random.random() * own)


def deviation(answers: list[Answer]) -> float:
    """sqrt(n) times the largest distance of the shares' distribution from the uniform one (Kolmogorov)."""
    random = Random(0)
    ranked = sorted(share for answer in answers for share in shares(*answer, random))
    n = len(ranked)
    return math.sqrt(n) * max(max((i + 1) / n - share, share - i / n) for i, share in enumerate(ranked))


def test_tokens_are_uniform_under_their_own_distributions() -> None:
    answers, accepted = serve(REQUESTS)
    assert accepted > 90  # else nothing speculative was tested
    assert deviation(answers) < BOUND


def test_a_noise_key_that_is_used_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    of = SamplingRows.of

    def reused(params: list[SamplingParams], positions: list[int], device: torch.device) -> SamplingRows:
        return of(params, [0] * len(positions), device)

    monkeypatch.setattr(SamplingRows, "of", reused)
    assert deviation(serve(2 * REQUESTS // 3)[0]) > BOUND


def test_an_outcome_of_the_wrong_parent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step

    def turned(self: Engine, segments: Sequence[Segment]) -> list[Outcome[int]]:
        found = step(self, segments)
        for outcome in found:
            if outcome.root is not None:
                outcome.root, *outcome.nodes = [*outcome.nodes, outcome.root]
        return found

    monkeypatch.setattr(Engine, "step", turned)
    assert deviation(serve(REQUESTS // 3)[0]) > BOUND


def test_a_node_that_is_taken_without_being_judged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's best guess below the root passes for the outcome."""
    step = Engine.step

    def skipped(self: Engine, segments: Sequence[Segment]) -> list[Outcome[int]]:
        found = step(self, segments)
        for segment, outcome in zip(segments, found, strict=True):
            first = next((node for node in segment.nodes if node.parent == ROOT), None)
            if first is not None:
                outcome.root = first.token
        return found

    monkeypatch.setattr(Engine, "step", skipped)
    assert deviation(serve(2 * REQUESTS // 3)[0]) > BOUND
