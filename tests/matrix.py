"""A cell of the matrix: a whole fleet (see tests/fleet.py) over a tiny random model, the requests that every cell
answers, and what judges the answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace

from distspec import config
from distspec.coordinator.context import Settings
from distspec.drafters import (
    DflashDrafter,
    Drafter,
    DraftRow,
    EagleDrafter,
    Guided,
    NgramDrafter,
    Proposal,
    StandaloneDrafter,
)
from distspec.drafters.base import taps_of
from distspec.drafters.features import FeatureDrafter
from distspec.engine import Engine
from distspec.models import Taps, Target, prefix_layers, random_model
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
from tests.chain import END, WORDS
from tests.covering import covering
from tests.desks import Ticks, guard
from tests.fleet import Fleet
from tests.shapes import TINY
from tests.spelling import letters
from tests.teacher import excused
from tests.wire import Port

CPU = torch.device("cpu")
SHAPE = dataclasses.replace(TINY, vocab_size=96, max_position=160)
BUDGET = 16
"""Rows of a step: prompts longer than this come in chunks."""
SLOTS = 4
"""Fewer than the requests, so that some wait."""
SCRATCH = 16
STEP_S, DRAFT_S = 0.1, 0.007
"""What workers say that steps of target and drafter took."""
LONG = tuple(7 * i * i % 96 for i in range(70))
REPEATED = (5, 9, 2, 11, 3) * 5
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SEEDED = SamplingParams(max_tokens=24, seed=2**63 + 11)
EDITED = SamplingParams(
    max_tokens=24,
    seed=5,
    temperature=1.4,
    logit_bias=((5, 3.0), (9, 3.0), (70, -4.0)),
    bad_words=((5, 9), (9, 2), (11,)),
    presence_penalty=-1.5,
    frequency_penalty=0.9,
    repetition_penalty=0.8,
)
CUT = SamplingParams(max_tokens=24, seed=77, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02)

REQUESTS: dict[str, tuple[tuple[int, ...], SamplingParams]] = {
    "greedy, one token": ((17,), GREEDY),
    "greedy, long": (LONG, GREEDY),
    "greedy, repeated": (REPEATED, GREEDY),
    "seeded, a shared prefix": ((*LONG[:66], 1, 2), SEEDED),
    "seeded, repeated": (REPEATED[:-2], SEEDED),
    "truncated, a shared prefix": (LONG[:67], CUT),
    "stopped": ((*REPEATED, 8), SamplingParams(max_tokens=24, seed=2**63 + 11, stop_token_ids=(49,))),
    "greedy, penalized": (REPEATED, replace(GREEDY, frequency_penalty=0.7, repetition_penalty=1.4)),
    "edited, repeated": (REPEATED[:-4], EDITED),
    **{
        f"constrained {i}": (prompt, replace(params, constraint=constraint, stop_token_ids=(END,)))
        for i, (constraint, (prompt, params)) in enumerate(
            zip(WORDS, ((REPEATED, CUT), (LONG, SEEDED), ((7,), EDITED)), strict=True)
        )
    },
    "edited, a shared prefix": (LONG[:65], replace(CUT, min_tokens=9, stop_token_ids=tuple(range(40)))),
}
READERS = ("eagle", "eagle3", "mtp", "dflash")
"""Drafters that read features: those of the worker that they are in, or such as targets send them."""
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


@dataclass(frozen=True)
class Cell:
    """One fleet. num_pages None: as many as all slots can use. overlap: of rounds that roll on a worker's device."""

    policy: str
    verifiers: int
    drafter: str
    colocated: bool
    page_size: int
    tree: str = "chain"
    num_pages: int | None = None
    overlap: bool = True

    @property
    def roles(self) -> list[str]:
        others = [] if self.colocated else ["prefill", "draft"]
        return ["decode", *["verify"] * self.verifiers, *others]

    def fleet(self, target: Llama, *, seed: int, loss: float = 0.0, **changes: Any) -> Fleet:
        sizes = {
            "lookahead": 2,
            "max_live_nodes": SCRATCH,
            "room": SCRATCH,
            "branch_nodes": 4,
            **TREES[self.tree],
            **changes,
        }
        reads = self.drafter in READERS
        settings = Settings(policy=self.policy, local_drafts=self.colocated, features=reads, **sizes)
        return Fleet(self.roles, settings, partial(self._build, target), seed=seed, loss=loss)

    def _build(self, target: Llama, role: str, port: Port, later: Callable[[Later], None]) -> tuple[Work, Hello]:
        if role == "draft":
            drafts = self._drafter(target)
            width = len(taps_of(drafts)) * SHAPE.hidden_size
            arrivals = Arrivals(port, later, width=width, dtype=torch.float32, device=CPU) if width else None
            work = DraftWork(drafts, Ticks(DRAFT_S), arrivals=arrivals)
            return work, self._hello(slots=64, capacity=10**6, drafts=True)
        engine = self._engine(target, taps=self._reader(target).taps if self.drafter in READERS else ())
        drafter = self._drafter(target) if self.colocated and role == "decode" else None
        desk = Desk(engine, drafter, max_num_batched_tokens=BUDGET, clock=Ticks(STEP_S), overlap=self.overlap)
        guard(desk)
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
        return Engine(model, self._options(), device=CPU, taps=taps, grammars=letters())

    def _reader(self, target: Llama) -> DraftModel:
        """A draft model with random weights."""
        return random_draft(FEATURED[self.drafter], Target.of(target), seed=5)

    def _reading(self, target: Llama) -> Drafter:
        model, longest = self._reader(target), SHAPE.max_position
        kind = partial(DflashDrafter, model) if isinstance(model, Dflash) else partial(EagleDrafter, model)
        drafter = kind(self._options(), max_model_len=longest, device=CPU, grammars=letters())
        return Checked(drafter, target)

    def _drafter(self, target: Llama) -> Drafter:
        if self.drafter in READERS:
            return self._reading(target)
        if self.drafter == "ngram":
            return Guided(NgramDrafter(config.Ngram(), max_model_len=SHAPE.max_position), letters())
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


def name(cell: Cell) -> str:
    placement = ("colocated" if cell.colocated else "disaggregated") + ("" if cell.overlap else "-in turn")
    return f"{cell.policy}-verify{cell.verifiers}-{cell.drafter}-{cell.tree}-page{cell.page_size}-{placement}"


def every(policies: Sequence[str], drafters: Sequence[str], *, seed: int = 0) -> list[Cell]:
    """Any two values of any two dimensions meet in a cell; and, with either placement, each policy meets each drafter,
    number of verifiers, tree and page size.
    """
    dimensions: tuple[Sequence[Any], ...] = (policies, (0, 1, 2), drafters, (True, False), PAGES, list(TREES))
    placed = [(0, 3, other) for other in (1, 2, 4, 5)]
    return [Cell(*row) for row in covering(*dimensions, groups=placed, seed=seed)]


def emitted(fleet: Fleet) -> int:
    return sum(len(stream.tokens) for stream in fleet.streams.values())


def keep_killing(cell: Cell, role: str, seed: int, target: Llama, answers: Answers) -> None:
    """Workers of that role die again and again, and start anew."""
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
