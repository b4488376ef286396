"""One request, one answer: whatever policy, drafter, page size, placement and number of verifiers serve it.

Every cell of the matrix is a whole fleet (see tests/fleet.py) over a tiny random model, and answers the same
requests at once. Greedy answers are those of transformers on the same weights, sampled ones those of the plain
target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from distspec import config
from distspec.coordinator.context import Settings
from distspec.drafters import (
    DflashDrafter,
    Drafter,
    DraftRow,
    EagleDrafter,
    NgramDrafter,
    Proposal,
    StandaloneDrafter,
)
from distspec.drafters.base import taps_of
from distspec.drafters.features import FeatureDrafter
from distspec.engine import Engine
from distspec.models import Taps, Target, prefix_layers, random_model, save_pretrained
from distspec.models.dflash import Dflash, DflashConfig
from distspec.models.draft_checkpoint import DraftConfig, DraftModel, random_draft
from distspec.models.eagle import EagleConfig
from distspec.models.eagle3 import Eagle3Config
from distspec.models.llama import Llama
from distspec.models.mtp import MtpConfig
from distspec.protocol.messages import Hello
from distspec.protocol.values import SamplingParams
from distspec.rounds import Desk
from distspec.rounds.arrivals import Arrivals
from distspec.workers.compute import Later, Work
from distspec.workers.draft import DraftWork
from distspec.workers.target import TargetWork
from tests.causal import Causal
from tests.desks import Ticks
from tests.fleet import Fleet
from tests.shapes import TINY
from tests.teacher import excused, plain
from tests.wire import Port

CPU = torch.device("cpu")
SHAPE = dataclasses.replace(TINY, vocab_size=96, max_position=160)
BUDGET = 16
"""Rows of a step: prompts longer than this come in chunks."""
SLOTS = 4
"""Fewer than the requests, so that some wait."""
SCRATCH = 16
LONG = tuple(7 * i * i % 96 for i in range(70))
REPEATED = (5, 9, 2, 11, 3) * 5
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SEEDED = SamplingParams(max_tokens=24, seed=2**63 + 11)
CUT = SamplingParams(max_tokens=24, seed=77, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02)

REQUESTS: dict[str, tuple[tuple[int, ...], SamplingParams]] = {
    "greedy, one token": ((17,), GREEDY),
    "greedy, long": (LONG, GREEDY),
    "greedy, repeated": (REPEATED, GREEDY),
    "seeded, a shared prefix": ((*LONG[:66], 1, 2), SEEDED),
    "seeded, repeated": (REPEATED[:-2], SEEDED),
    "truncated, a shared prefix": (LONG[:67], CUT),
    "stopped": ((*REPEATED, 8), SamplingParams(max_tokens=24, seed=2**63 + 11, stop_token_ids=(49,))),
}
READERS = ("eagle", "eagle3", "mtp", "dflash")
"""Drafters that read features, which targets send to the draft worker."""
POLICIES = ("ar", "sd", "pearl", "dsi", "ssd", "bvsp")
DRAFTERS = ("ngram", "random", "layers", "right", "wrong")
PAGES = (1, 4, 16, 64)
_LAYER = dataclasses.replace(SHAPE, num_layers=1)
_BLOCK = dataclasses.replace(SHAPE, model_type="qwen3")
FEATURED: dict[str, DraftConfig] = {
    "eagle": EagleConfig(_LAYER, (2,)),
    "eagle3": Eagle3Config(layer=_LAYER, taps=(2, 0, 1), target_hidden_size=SHAPE.hidden_size, draft_vocab_size=96),
    "mtp": MtpConfig(dataclasses.replace(_LAYER, model_type="qwen3"), index=2),
    "dflash": DflashConfig(layer=_BLOCK, taps=(1, 2), block_size=4, mask_token=95),
}
TREES: dict[str, dict[str, Any]] = {
    "chain": {"topk": 1, "steps": 3},
    "static": {"topk": 2, "steps": 3, "nodes": 7},
    "dynamic": {"topk": 4, "steps": 2, "nodes": 9, "static": False},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small are done before a second thread has woken up."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> Llama:
    return random_model(SHAPE, seed=3, dtype=torch.float32, device=CPU)


@dataclass
class Answers:
    """The right outputs, and how many tokens of others were excused."""

    target: Llama
    right: dict[str, tuple[list[int], str]]
    tokens: int = 0
    excused: int = 0

    def judge(self, fleet: Fleet) -> None:
        for key, (prompt, params) in REQUESTS.items():
            got, (tokens, reason) = fleet.streams[key], self.right[key]
            if got.finished == "abort":
                tokens, reason = tokens[: len(got.tokens)], "abort"
            self.tokens += len(tokens)
            if (got.tokens, got.finished) != (tokens, reason):
                excused(self.target, prompt, tokens, params)
                self.excused += max(1, excused(self.target, prompt, got.tokens, params))


@pytest.fixture(scope="module")
def answers(target: Llama, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    folder = tmp_path_factory.mktemp("target")
    save_pretrained(target, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    right = {}
    for key, (prompt, params) in REQUESTS.items():
        right[key] = plain(target, prompt, params)
        if params.temperature == 0:
            ids = torch.tensor([prompt])
            out = theirs.generate(ids, max_new_tokens=params.max_tokens, do_sample=False, eos_token_id=None)
            assert out[0, len(prompt) :].tolist() == right[key][0]
    answers = Answers(target, right)
    yield answers
    print(f"\n{answers.excused} of {answers.tokens} tokens excused by a margin")
    assert answers.excused <= answers.tokens // 1000


@dataclass(frozen=True)
class Cell:
    """One fleet. num_pages None: as many as all slots can use."""

    policy: str
    verifiers: int
    drafter: str
    colocated: bool
    page_size: int
    tree: str = "chain"
    num_pages: int | None = None

    @property
    def roles(self) -> list[str]:
        others = [] if self.colocated else ["prefill", "draft"]
        return ["decode", *["verify"] * self.verifiers, *others]

    def fleet(self, target: Llama, *, seed: int, loss: float = 0.0, **changes: Any) -> Fleet:
        sizes = {"lookahead": 2, "live": SCRATCH, "room": SCRATCH, "early": 4, **TREES[self.tree], **changes}
        reads = self.drafter in READERS and not self.colocated
        settings = Settings(policy=self.policy, local_drafts=self.colocated, features=reads, **sizes)
        return Fleet(self.roles, settings, partial(self._build, target), seed=seed, loss=loss)

    def _build(self, target: Llama, role: str, port: Port, later: Callable[[Later], None]) -> tuple[Work, Hello]:
        if role == "draft":
            drafts = self._drafter(target)
            width = len(taps_of(drafts)) * SHAPE.hidden_size
            arrivals = Arrivals(port, later, width=width, dtype=torch.float32, device=CPU) if width else None
            work = DraftWork(drafts, Ticks(), arrivals=arrivals)
            return work, self._hello(slots=64, capacity=10**6, drafts=True)
        engine = self._engine(target, taps=self._reader(target).taps if self.drafter in READERS else ())
        drafter = self._drafter(target) if self.colocated and role == "decode" else None
        desk = Desk(engine, drafter, max_num_batched_tokens=BUDGET, clock=Ticks())
        hello = self._hello(slots=engine.slots, capacity=engine.capacity, drafts=drafter is not None)
        return TargetWork(engine, desk, port, later), hello

    def _options(self) -> config.Engine:
        pages = self.num_pages or SLOTS * (-(-SHAPE.max_position // self.page_size) + 1)
        return config.Engine(
            page_size=self.page_size,
            num_pages=pages,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=BUDGET,
            max_scratch_nodes=SCRATCH,
        )

    def _engine(self, model: Llama, taps: Sequence[int] = ()) -> Engine:
        return Engine(model, self._options(), device=CPU, taps=taps)

    def _reader(self, target: Llama) -> DraftModel:
        """A draft model with random weights."""
        return random_draft(FEATURED[self.drafter], Target.of(target), seed=5)

    def _reading(self, target: Llama) -> Drafter:
        model, longest = self._reader(target), SHAPE.max_position
        if isinstance(model, Dflash):
            return Checked(DflashDrafter(model, self._options(), max_model_len=longest, device=CPU), target)
        return Checked(EagleDrafter(model, self._options(), max_model_len=longest, device=CPU), target)

    def _drafter(self, target: Llama) -> Drafter:
        if self.drafter in READERS:
            return self._reading(target)
        if self.drafter == "ngram":
            return NgramDrafter(config.Ngram(), max_model_len=SHAPE.max_position)
        other = random_model(SHAPE, seed=4, dtype=torch.float32, device=CPU)
        model = {"random": other, "layers": prefix_layers(target, 1)}.get(self.drafter, target)
        drafter = StandaloneDrafter(
            self._engine(model),
            max_num_batched_tokens=BUDGET,
            max_scratch_nodes=SCRATCH,
            max_model_len=SHAPE.max_position,
        )
        return Wrong(drafter) if self.drafter == "wrong" else drafter

    def _hello(self, *, slots: int, capacity: int, drafts: bool) -> Hello:
        return Hello(
            worker="",
            role="",
            incarnation=0,
            fingerprint={},
            slots=slots,
            capacity=capacity,
            page_size=self.page_size,
            max_model_len=SHAPE.max_position,
            vocab_size=SHAPE.vocab_size,
            drafts=drafts,
        )


@dataclass
class Checked:
    """Holds whoever sends features to what they are: those of the text, as one forward without pages has them."""

    inner: FeatureDrafter
    target: Llama
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        for row in rows:
            text = self.texts[row.request] = self.texts.get(row.request, ())[: row.keep] + row.tokens
            found = Taps(self.taps)
            self.target.forward(torch.tensor(text), torch.arange(len(text)), Causal(), found)
            right = torch.cat((torch.zeros_like(found.features()[:1]), found.features()[:-1]))
            torch.testing.assert_close(row.features, right[row.keep :], atol=1e-4, rtol=1e-4)
        return self.inner.propose(rows)

    def forget(self, request: int) -> None:
        self.texts.pop(request, None)
        self.inner.forget(request)

    def check(self) -> None:
        self.inner.check()


@dataclass
class Wrong:
    """What a drafter does not say. With the target's own model inside, it is never right."""

    inner: Drafter

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [
            dataclasses.replace(proposal, tokens=tuple((token + 1) % SHAPE.vocab_size for token in proposal.tokens))
            for proposal in self.inner.propose(rows)
        ]

    def forget(self, request: int) -> None:
        self.inner.forget(request)

    def check(self) -> None:
        self.inner.check()


def serve(fleet: Fleet) -> Fleet:
    submit(fleet)
    fleet.run()
    return fleet


def submit(fleet: Fleet) -> None:
    for key, (prompt, params) in REQUESTS.items():
        fleet.submit(key, prompt, params)


# Page sizes and trees take turns: each meets each policy, drafter, placement and number of verifiers somewhere.
CELLS = [
    Cell(*cell, PAGES[i % len(PAGES)], list(TREES)[i % len(TREES)])
    for i, cell in enumerate(product(POLICIES, (0, 1, 2), DRAFTERS, (True, False)))
]


CELLS += [
    Cell(policy, verifiers, READERS[i % len(READERS)], False, PAGES[i % len(PAGES)], list(TREES)[i % len(TREES)])
    for i, (policy, verifiers) in enumerate(product(POLICIES[1:], (0, 1, 2)))
]
"""Every policy gets its features from home, from a verifier, and from several."""


def name(cell: Cell) -> str:
    placement = "colocated" if cell.colocated else "disaggregated"
    return f"{cell.policy}-verify{cell.verifiers}-{cell.drafter}-{cell.tree}-page{cell.page_size}-{placement}"


@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_the_answers_are_the_plain_targets(cell: Cell, target: Llama, answers: Answers) -> None:
    fleet = serve(cell.fleet(target, seed=CELLS.index(cell)))
    answers.judge(fleet)
    check_that_all_took_part(cell, fleet)


def check_that_all_took_part(cell: Cell, fleet: Fleet) -> None:
    """Answers prove nothing about workers that had no part in them."""
    seen, accepted = fleet.seen, sum(s.usage.accepted for s in fleet.streams.values() if s.usage)
    driven = cell.policy != "ar" and not (cell.policy == "sd" and cell.colocated)
    assert (seen["prefill", "Verdict"] > 0) == (not cell.colocated)
    assert (seen["decode", "Received"] > 0) == (not cell.colocated)
    assert (seen["decode", "Progress"] > 0) == (not driven)
    assert (seen["decode", "Drafted"] > 0) == (driven and cell.colocated)
    assert (seen["draft", "Drafted"] > 0) == (driven and not cell.colocated)
    assert (seen["verify", "Verdict"] > 0) == (driven and cell.verifiers > 0)
    if cell.drafter != "wrong":
        assert (accepted > 0) == (cell.policy != "ar")
    elif cell.tree == "chain" and cell.policy in ("ar", "sd", "pearl", "dsi"):
        assert not accepted  # of a tree that is never right first, another guess may be
    assert any(s.usage.cached_tokens for s in fleet.streams.values() if s.usage)


# -- trouble -----------------------------------------------------------------------------------------


def emitted(fleet: Fleet) -> int:
    return sum(len(stream.tokens) for stream in fleet.streams.values())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("role", ["prefill", "decode", "verify", "draft"])
@pytest.mark.parametrize("seed", range(3))
def test_a_worker_that_dies_changes_no_token(
    role: str, policy: str, seed: int, target: Llama, answers: Answers
) -> None:
    keep_killing(Cell(policy, 2, DRAFTERS[seed], False, PAGES[seed], list(TREES)[seed]), role, seed, target, answers)


@pytest.mark.parametrize(
    ("role", "policy"),
    [("prefill", "sd"), ("decode", "dsi"), ("verify", "bvsp"), ("verify", "sd"), ("draft", "ssd"), ("draft", "pearl")],
)
def test_a_worker_that_dies_with_features_under_way_changes_no_token(
    role: str, policy: str, target: Llama, answers: Answers
) -> None:
    seed = POLICIES.index(policy)
    keep_killing(Cell(policy, 2, READERS[seed % 4], False, PAGES[seed % 4], "static"), role, seed, target, answers)


def keep_killing(cell: Cell, role: str, seed: int, target: Llama, answers: Answers) -> None:
    fleet = cell.fleet(target, seed=seed)
    submit(fleet)
    for tokens in (2, 30, 60, 90):
        fleet.run(until=lambda tokens=tokens: emitted(fleet) >= tokens)  # type: ignore[misc]
        victim = next(name for name, site in fleet.sites.items() if site.role == role)
        fleet.kill(victim)
        pause = fleet.turns + fleet.random.randint(1, 60)
        fleet.run(until=lambda pause=pause: fleet.turns >= pause)  # type: ignore[misc]
        fleet.start(victim, role)
    fleet.run()
    answers.judge(fleet)
    assert fleet.machine.snapshot()["counters"]["workers_lost"] == 4


@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_coordinator_that_dies_repeats_and_loses_no_token(
    seed: int, colocated: bool, target: Llama, answers: Answers
) -> None:
    drafter = DRAFTERS[seed] if colocated or seed % 2 else READERS[seed]
    cell = Cell(POLICIES[seed + 1], 1, drafter, colocated, 16, list(TREES)[seed % 3])
    fleet = cell.fleet(target, seed=seed)
    submit(fleet)
    for tokens in (1, 40, 80):
        fleet.run(until=lambda tokens=tokens: emitted(fleet) >= tokens)  # type: ignore[misc]
        fleet.restart_coordinator()
    fleet.run()
    answers.judge(fleet)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 130), (4, 34)])
def test_requests_that_pages_run_out_for_are_computed_again(
    policy: str, colocated: bool, page_size: int, num_pages: int, target: Llama, answers: Answers
) -> None:
    cell = Cell(policy, 1, "ngram", colocated, page_size, num_pages=num_pages)
    fleet = serve(cell.fleet(target, seed=page_size))
    answers.judge(fleet)
    assert any(kind == "Refused" for _, kind in fleet.seen)


def test_requests_that_pages_run_out_for_take_their_features_along(target: Llama, answers: Answers) -> None:
    fleet = serve(Cell("ssd", 1, "eagle3", False, 4, "static", num_pages=34).fleet(target, seed=4))
    answers.judge(fleet)
    assert any(kind == "Refused" for _, kind in fleet.seen)


@pytest.mark.parametrize("seed", range(6))
def test_kv_links_that_break_change_no_token(seed: int, target: Llama, answers: Answers) -> None:
    cell = Cell(POLICIES[seed], 2, "layers", False, 16, list(TREES)[seed % 3])
    fleet = serve(cell.fleet(target, seed=seed, loss=0.15))
    answers.judge(fleet)
    assert fleet.machine.snapshot()["counters"]["transfers_lost"] > 0


@pytest.mark.parametrize("seed", range(1, 6))
def test_features_that_are_lost_on_the_way_change_no_token(seed: int, target: Llama, answers: Answers) -> None:
    cell = Cell(POLICIES[seed], 2, READERS[seed % 4], False, 16, list(TREES)[seed % 3])
    fleet = serve(cell.fleet(target, seed=seed, loss=0.08))
    answers.judge(fleet)
    assert fleet.machine.snapshot()["counters"]["features_lost"] > 0


@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_clients_that_go_away_disturb_nobody(seed: int, colocated: bool, target: Llama, answers: Answers) -> None:
    drafter = DRAFTERS[seed] if colocated or seed % 2 else READERS[seed + 1]
    cell = Cell(POLICIES[seed + 2], 1, drafter, colocated, 16, list(TREES)[seed % 3])
    fleet = cell.fleet(target, seed=seed)
    submit(fleet)
    for tokens, key in zip((1, 20, 50), list(REQUESTS)[1::2], strict=True):
        fleet.run(until=lambda tokens=tokens: emitted(fleet) >= tokens)  # type: ignore[misc]
        fleet.cancel(key)
    fleet.run()
    answers.judge(fleet)
    assert any(stream.finished == "abort" for stream in fleet.streams.values())


# -- choices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("colocated", [True, False])
def test_each_request_may_choose_its_policy(colocated: bool, target: Llama, answers: Answers) -> None:
    """Also its number of drafts is its own here: it follows acceptance and cost."""
    fleet = Cell("sd", 1, "layers", colocated, 16).fleet(target, seed=1, steps=None)
    for i, (key, (prompt, params)) in enumerate(REQUESTS.items()):
        fleet.submit(key, prompt, params, policy=POLICIES[i % len(POLICIES)])
    fleet.run()
    answers.judge(fleet)
    assert {stream.usage.policy for stream in fleet.streams.values() if stream.usage} == set(POLICIES)


def test_choices_of_one_request_differ_and_can_be_had_again(target: Llama) -> None:
    """n=3 is one seed and three choices."""
    wanted = {choice: replace(SEEDED, choice=choice) for choice in range(3)}
    right = {choice: plain(target, LONG, params)[0] for choice, params in wanted.items()}
    assert len({tuple(tokens) for tokens in right.values()}) == 3
    for seed, policy in enumerate(POLICIES):
        fleet = Cell(policy, 1, "layers", False, 16).fleet(target, seed=seed)
        for choice, params in wanted.items():
            fleet.submit(str(choice), LONG, params)
        fleet.run()
        assert {choice: fleet.streams[str(choice)].tokens for choice in wanted} == right
