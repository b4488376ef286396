"""What is drawn has the target's distribution, under every policy: G-tests over a vocabulary of 8.

Each sample is a whole request of three tokens with a seed of its own, served by a fleet of real engines (see
tests/fleet.py). The exact joint distribution is computed from dense forwards. A test that never fails would prove
nothing, so faults are planted, and must be found; one that must not matter, in the drafter, must not.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as Bytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from distspec import config
from distspec.constraints import Compiler, Grammars
from distspec.coordinator import answers
from distspec.coordinator.context import Settings
from distspec.coordinator.request import Request
from distspec.drafters import Drafter, DraftRow, Guided, Proposal, StandaloneDrafter
from distspec.engine import Engine, Guessing, batch
from distspec.engine.acceptance import ACCEPTANCES, COUPLED, Acceptance, Rejection
from distspec.models import prefix_layers, random_model
from distspec.models.llama import Llama
from distspec.protocol.messages import Hello, Verdict
from distspec.protocol.values import ROOT, Constraint, SamplingParams
from distspec.rounds import Desk
from distspec.sampling import Asked, SamplingRows, process
from distspec.sampling.rejection import Drafts, Rule, block, ratio
from distspec.speculation.policies import POLICIES
from distspec.workers.compute import Later, Work
from distspec.workers.draft import DraftWork
from distspec.workers.target import TargetWork
from tests.causal import logits
from tests.chain import edited
from tests.desks import Ticks
from tests.fleet import Build, Fleet, Stream
from tests.frequencies import FAULTY, SOUND, g_test
from tests.shapes import TINY
from tests.spelling import Here
from tests.wire import Port

RULES: dict[str, Rule] = {"ratio": ratio, "block": block}
pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SHAPE = dataclasses.replace(TINY, vocab_size=8, max_position=64)
PROMPT = (3, 1, 4, 1, 5)
PARAMS = SamplingParams(max_tokens=3, temperature=0.9, top_p=0.92)
EDITED = SamplingParams(
    max_tokens=3,
    temperature=1.1,
    min_p=0.04,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.8,
    logit_bias=((2, 1.5), (6, -1.0)),
    allowed_token_ids=(0, 1, 2, 3, 5, 6, 7),
    bad_words=((2, 5), (0,)),
    stop_token_ids=(7,),
    min_tokens=2,
)
"""What a token may be depends on the tokens before it, drafted ones included."""
GRAMMAR = SamplingParams(
    max_tokens=3,
    temperature=1.2,
    frequency_penalty=0.5,
    stop_token_ids=(7,),
    constraint=Constraint(kind="regex", text="([a-d][b-f]|e[a-c]g?)+"),
)
LETTERS = "abcdefg"
"""Tokens 0 to 6; token 7 ends a text."""
WISHES = {
    "top_p": PARAMS,
    "top_k": replace(PARAMS, temperature=1.3, top_p=1.0, top_k=4),
    "edited": EDITED,
    "grammar": GRAMMAR,
}
SAMPLES = 600
AT_ONCE = 60


Path = tuple[int, ...]


@cache
def target() -> Llama:
    return random_model(SHAPE, seed=7, dtype=torch.float32, device=CPU)


@cache
def joint(params: SamplingParams, tokens: int = 3) -> dict[Path, float]:
    """The exact probability of everything that an output can be up to so many tokens."""
    exact: dict[Path, float] = {(): 1.0}
    for _ in range(tokens):
        exact = dict(pair for path, p in exact.items() for pair in longer(path, p, params))
    return exact


def longer(path: Path, probability: float, params: SamplingParams) -> list[tuple[Path, float]]:
    if path and path[-1] in params.stop_token_ids:
        return [(path, probability)]
    return [((*path, token), probability * p) for token, p in enumerate(after(path, params)) if p]


@cache
def after(path: Path, params: SamplingParams) -> list[float]:
    """The processed distribution of the next token."""
    text = [*PROMPT, *path]
    unbound = replace(params, prompt_tokens=len(PROMPT), constraint=None)  # which tests.chain knows of its own words
    scores = edited(logits(target(), text)[-1], text, unbound)
    if params.constraint is not None:
        scores[[token for token in range(len(scores)) if not fits(params.constraint.text, (*path, token))]] = -torch.inf
    rows = SamplingRows.of([params], [0], CPU)
    probabilities: list[float] = process(scores[None], rows).softmax(-1)[0].tolist()
    return probabilities


def fits(regex: str, path: Path) -> bool:
    """Whether some text that matches begins so, or is that; one token more is enough to see it."""
    text = "".join(LETTERS[token] for token in path if token < len(LETTERS))
    ends = [text] if path[-1] == len(LETTERS) else [text, *(text + letter for letter in LETTERS)]
    return any(re.fullmatch(regex, end) for end in ends)


@cache
def grammars() -> Grammars:
    backend = Tokenizer(BPE(vocab={letter: token for token, letter in enumerate(LETTERS)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False, use_regex=False), Bytes()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    return Grammars(lambda: Compiler(tokenizer, SHAPE.vocab_size, [len(LETTERS)]), executor=Here())


def engine(model: Llama, acceptance: Acceptance = COUPLED) -> Engine:
    options = config.Engine(page_size=4, num_pages=64 * 8, max_num_seqs=64, max_scratch_nodes=16)
    return Engine(model, options, device=CPU, acceptance=acceptance, grammars=grammars())


def drafter(acceptance: Acceptance = COUPLED) -> StandaloneDrafter:
    of = engine(prefix_layers(target(), 1), acceptance)
    return StandaloneDrafter(of, max_num_batched_tokens=256, max_scratch_nodes=16, max_model_len=64)


class Sharp:
    """A drafter that is too sure of itself: much of what it drafts is refused, and what is put in its place matters."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        sharp = [dataclasses.replace(row, params=replace(row.params, top_p=1.0, temperature=0.3)) for row in rows]
        return self._inner.propose(sharp)

    def forget(self, request: int) -> None:
        self._inner.forget(request)

    def check(self) -> None:
        self._inner.check()


def hello(*, drafts: bool) -> Hello:
    return Hello(
        worker="",
        role="",
        incarnation=0,
        fingerprint={},
        slots=64,
        capacity=10**6,
        page_size=4,
        max_model_len=SHAPE.max_position,
        vocab_size=SHAPE.vocab_size,
        drafts=drafts,
    )


def build(role: str, port: Port, later: Callable[[Later], None]) -> tuple[Work, Hello]:
    if role == "draft":
        return DraftWork(Guided(drafter(), grammars()), Ticks()), hello(drafts=True)
    judge = engine(target())
    desk = Desk(judge, None, max_num_batched_tokens=256, clock=Ticks())
    return TargetWork(judge, desk, port, later), hello(drafts=False)


def drafting(acceptance: Acceptance) -> Build:
    """A worker that drafts for itself."""

    def build(role: str, port: Port, later: Callable[[Later], None]) -> tuple[Work, Hello]:
        judge = engine(target(), acceptance)
        desk = Desk(judge, Guided(Sharp(drafter(acceptance)), grammars()), max_num_batched_tokens=256, clock=Ticks())
        return TargetWork(judge, desk, port, later), hello(drafts=True)

    return build


def outputs(
    seeds: range, params: SamplingParams, settings: Settings, roles: Sequence[str], build: Build
) -> Iterator[Stream]:
    """What a fleet answers, some requests at once, each with a seed of its own."""
    for first in seeds[::AT_ONCE]:
        fleet = Fleet(roles, settings, build, seed=first)
        for seed in range(first, min(first + AT_ONCE, seeds.stop)):
            fleet.submit(str(seed), PROMPT, replace(params, seed=seed))
        fleet.run(turns=100_000)
        yield from fleet.streams.values()


def deviation(policy: str, samples: int = SAMPLES, params: SamplingParams = PARAMS) -> float:
    """How far the outputs of so many seeds, other ones for each policy, are from the exact joint distribution, in
    standard deviations."""
    settings = Settings(
        policy=policy, steps=2, topk=2, nodes=4, lookahead=1, max_live_nodes=12, branch_nodes=2, room=16
    )
    begin = list(POLICIES).index(policy) * SAMPLES
    found = outputs(range(begin, begin + samples), params, settings, ["decode", "verify", "draft"], build)
    return g_test(Counter(tuple(stream.tokens) for stream in found), joint(params))


def deviation_of(acceptance: Acceptance, samples: int = SAMPLES, params: SamplingParams = PARAMS) -> float:
    """The same of a worker that drafts three tokens a round for itself. The first token of an output is no draft, so
    the joint distribution is of the three after it; a stream goes on after these, since nothing is drafted near its
    end."""
    settings = Settings(policy="sd", local_drafts=True, steps=3)
    params, exact, accepted = replace(params, max_tokens=7), Counter[Path](), 0
    for path, p in joint(params, 4).items():
        exact[path[1:]] += p  # type: ignore[assignment]
    seen: Counter[Path] = Counter()
    for stream in outputs(range(samples), params, settings, ["decode"], drafting(acceptance)):
        assert stream.usage is not None
        seen[tuple(stream.tokens[1:4])] += 1
        accepted += stream.usage.accepted
    assert accepted > samples  # else hardly anything was kept
    return g_test(seen, exact)


@pytest.mark.parametrize("wish", ["top_p", "edited", "grammar"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_joint_of_three_tokens_is_the_targets(policy: str, wish: str) -> None:
    assert abs(deviation(policy, params=WISHES[wish])) < SOUND


@pytest.mark.parametrize(("factor", "is_found"), [(1.0, False), (2.0, True)])
def test_the_test_itself_has_power(factor: float, is_found: bool) -> None:
    """Draws from the distribution itself pass, and those with a likeliest output twice as likely do not."""
    exact = joint(PARAMS)
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
    verdict = answers.verdict

    def shifted(request: object, message: Verdict) -> bool:
        drawn = [token for _, token in message.outcomes]
        nodes = [node for node, _ in message.outcomes]
        turned = tuple(zip(nodes, drawn[1:] + drawn[:1], strict=True))
        return verdict(request, replace(message, outcomes=turned))  # type: ignore[arg-type]

    monkeypatch.setattr(answers, "verdict", shifted)
    assert deviation(policy) > FAULTY


@pytest.mark.parametrize("policy", ["sd", "ssd"])
def test_a_node_that_is_taken_without_being_judged_is_found(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter's best guess below the root passes for the outcome."""
    verdict = answers.verdict

    def skipped(request: Request, message: Verdict) -> bool:
        children = request.tree[request.tree.root].children
        if not children:
            return verdict(request, message)
        token = next(iter(children))
        outcomes = tuple((node, token if node == ROOT else drawn) for node, drawn in message.outcomes)
        return verdict(request, replace(message, outcomes=outcomes))

    monkeypatch.setattr(answers, "verdict", skipped)
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

    def loose(self: Engine, *asked: Any) -> Guessing:
        for slot, known in self._open.items():
            self._open[slot] = dataclasses.replace(known, params=replace(known.params, top_p=1.0))
        return guess(self, *asked)

    monkeypatch.setattr(Engine, "guess", loose)
    assert outputs() == right


def test_every_output_has_its_probability() -> None:
    everything = product(range(SHAPE.vocab_size), repeat=PARAMS.max_tokens)
    assert joint(replace(PARAMS, top_p=1.0)).keys() == set(everything)
    for params in WISHES.values():
        assert sum(joint(params).values()) == pytest.approx(1)


# -- drafts that are weighed ---------------------------------------------------------------------


@pytest.mark.parametrize("params", WISHES.values(), ids=WISHES)
@pytest.mark.parametrize("acceptance", RULES)
def test_the_joint_of_three_weighed_tokens_is_the_targets(acceptance: str, params: SamplingParams) -> None:
    assert abs(deviation_of(ACCEPTANCES[acceptance], params=params)) < SOUND


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_residual_that_is_left_out_is_found(rule: Rule) -> None:
    """What takes the place of a draft is drawn as if none had been refused."""

    def whole(p: Tensor, q: Tensor, coins: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
        return rule(p, q, coins, drafts)[0], p

    assert deviation_of(Rejection(whole), SAMPLES // 2) > FAULTY


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_law_of_another_step_is_found(rule: Rule) -> None:
    def turned(p: Tensor, q: Tensor, coins: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
        return rule(p, q.roll(1, 0), coins, drafts)

    assert deviation_of(Rejection(turned), SAMPLES // 2) > FAULTY


def test_penalties_that_do_not_see_drafts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = batch._asked

    def blind(*of: Any) -> Asked:
        found = asked(*of)
        return dataclasses.replace(found, paths=[()] * len(found.paths))

    monkeypatch.setattr(batch, "_asked", blind)
    assert deviation("sd", params=EDITED) > FAULTY
