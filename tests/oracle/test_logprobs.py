"""Logprobs of whole fleets: those of transformers on the same weights, whatever policy, drafter, placement, and
trouble; with speculation as without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoModelForCausalLM

from distspec import config
from distspec.engine import Engine
from distspec.engine.acceptance import ACCEPTANCES
from distspec.models import save_pretrained
from distspec.models.llama import Llama
from distspec.protocol.values import SamplingParams
from tests.fleet import Fleet
from tests.matrix import CPU, CUT, DRAFTERS, GREEDY, LONG, PAGES, POLICIES, REPEATED, SEEDED, TREES, Cell, emitted
from tests.teacher import plain
from tests.told import check, processed

pytestmark = pytest.mark.usefixtures("one_thread")

EDITED = replace(
    SEEDED, logprobs=4, presence_penalty=1.5, logit_bias=((11, 3.0), (7, -100.0)), bad_words=((5,), (9, 2))
)
ASKED: dict[str, tuple[tuple[int, ...], SamplingParams]] = {
    "greedy, with its prompt": (LONG, replace(GREEDY, logprobs=3, prompt_logprobs=2)),
    "one of two choices": (REPEATED, replace(SEEDED, logprobs=0)),
    "the other": (REPEATED, replace(SEEDED, choice=1, logprobs=5, prompt_logprobs=0)),
    "truncated, a shared prefix": (LONG[:67], replace(CUT, logprobs=20, prompt_logprobs=20)),
    "the prompt alone": (LONG[:66], replace(CUT, prompt_logprobs=1, max_tokens=3)),
    "nothing": (LONG[:68], SEEDED),
    "edited": (REPEATED[:-1], EDITED),
    "stopped": ((*REPEATED, 8), replace(SEEDED, logprobs=1, stop_token_ids=(49,))),
}


@dataclass(frozen=True)
class Processed(Cell):
    def _options(self) -> config.Engine:
        return replace(super()._options(), logprobs_mode="processed_logprobs")


@pytest.fixture(scope="module")
def model_says(target: Llama, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[int]], Tensor]:
    """Logits after every token of a text, by transformers."""
    folder = tmp_path_factory.mktemp("target")
    save_pretrained(target, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return lambda text: theirs(torch.tensor([list(text)])).logits[0].detach()


@pytest.fixture(scope="module")
def judge(model_says: Callable[[Sequence[int]], Tensor]) -> Callable[[Fleet, bool], None]:
    def judge(fleet: Fleet, is_raw: bool = True) -> None:
        for key, (prompt, asked) in ASKED.items():
            stream, params = fleet.streams[key], replace(asked, prompt_tokens=len(prompt))
            text = [*prompt, *stream.tokens]
            scores = model_says(text)
            assert len(stream.logprobs) == (len(stream.tokens) if params.logprobs is not None else 0), key
            for at, said in enumerate(stream.logprobs, start=len(prompt)):
                row = scores[at - 1] if is_raw else processed(scores[at - 1], text[:at], params)
                check(said, row, text[at], params.logprobs or 0)
            assert len(stream.prompt_logprobs) == (len(prompt) - 1 if params.prompt_logprobs is not None else 0), key
            for at, said in enumerate(stream.prompt_logprobs, start=1):
                check(said, scores[at - 1], text[at], params.prompt_logprobs or 0)

    return judge


def submit(fleet: Fleet) -> Fleet:
    for key, (prompt, params) in ASKED.items():
        fleet.submit(key, prompt, params)
    return fleet


CELLS = [
    Cell(
        policy, 0 if colocated else 2, DRAFTERS[(i + 1) % 4], colocated, PAGES[i % 4], list(TREES)[(i + colocated) % 3]
    )
    for i, policy in enumerate(POLICIES)
    for colocated in (True, False)
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.policy}-{cell.colocated}-{cell.drafter}-{cell.tree}")
def test_they_are_those_of_transformers(cell: Cell, target: Llama, judge: Callable[[Fleet, bool], None]) -> None:
    fleet = submit(cell.fleet(target, seed=CELLS.index(cell)))
    fleet.run()
    for key, (prompt, params) in ASKED.items():
        assert (fleet.streams[key].tokens, fleet.streams[key].finished) == plain(target, prompt, params), key
    judge(fleet, True)


@pytest.mark.parametrize("policy", POLICIES)
def test_those_of_what_is_drawn_from(policy: str, target: Llama, judge: Callable[[Fleet, bool], None]) -> None:
    i = POLICIES.index(policy)
    fleet = submit(Processed(policy, 2, DRAFTERS[1 + i % 3], i % 2 == 0, 16, list(TREES)[i % 3]).fleet(target, seed=i))
    fleet.run()
    judge(fleet, False)


@pytest.mark.parametrize("role", ["prefill", "decode", "verify", "coordinator"])
@pytest.mark.parametrize("policy", ["ar", "dsi", "bvsp"])
def test_they_come_once_whoever_dies(
    role: str, policy: str, target: Llama, judge: Callable[[Fleet, bool], None]
) -> None:
    fleet = submit(Cell(policy, 2, "layers", False, 4, "static").fleet(target, seed=ord(role[0])))
    for tokens in (0, 20, 60, 100):
        fleet.run(until=lambda tokens=tokens: emitted(fleet) >= tokens)  # type: ignore[misc]
        pause = fleet.turns + fleet.random.randint(1, 60)
        fleet.run(until=lambda pause=pause: fleet.turns >= pause)  # type: ignore[misc]
        if role == "coordinator":
            fleet.restart_coordinator()
        else:
            victim = next(name for name, site in fleet.sites.items() if site.role == role)
            fleet.kill(victim)
            fleet.start(victim, role)
    fleet.run()
    judge(fleet, True)


def test_requests_that_push_each_other_out_of_the_pages(target: Llama, judge: Callable[[Fleet, bool], None]) -> None:
    fleet = submit(Cell("sd", 0, "layers", True, 4, "dynamic", num_pages=34).fleet(target, seed=3))
    fleet.run()
    assert fleet.machine.snapshot()["counters"]["requeued"] > 0
    judge(fleet, True)


def test_rounds_that_judge_one_guess(target: Llama, judge: Callable[[Fleet, bool], None]) -> None:
    fleet = submit(Cell("sd", 0, "layers", True, 16).fleet(target, seed=3, steps=1, nodes=1))
    fleet.run()
    assert sum(stream.usage.accepted for stream in fleet.streams.values() if stream.usage) > 0
    judge(fleet, True)


class Replicated(Cell):
    @property
    def roles(self) -> list[str]:
        return ["decode", "decode", *super().roles]


@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize("policy", ["ar", "sd", "dsi"])
def test_batches_that_several_replicas_share(
    policy: str, colocated: bool, target: Llama, judge: Callable[[Fleet, bool], None]
) -> None:
    """Each request is told of its own tokens, as many as there are, whichever others are in its replica's batch."""
    fleet = submit(Replicated(policy, 1, "layers", colocated, 16).fleet(target, seed=9))
    fleet.run(until=lambda: emitted(fleet) >= 40)
    open_at = {name: worker["open"] for name, worker in fleet.machine.snapshot()["workers"].items()}
    assert all(open_at[f"decode:{i}"] for i in range(3))
    fleet.run()
    judge(fleet, True)


class Weighed(Cell):
    def _engine(self, model: Llama, taps: Sequence[int] = ()) -> Engine:
        return Engine(model, self._options(), device=CPU, taps=taps, acceptance=ACCEPTANCES["ratio"])


def test_drafts_that_are_judged_by_what_they_were_drawn_from(
    target: Llama, judge: Callable[[Fleet, bool], None]
) -> None:
    """The text is another then; what is told of it is not."""
    fleet = submit(Weighed("sd", 0, "layers", True, 16).fleet(target, seed=5))
    fleet.run()
    assert sum(stream.usage.accepted for stream in fleet.streams.values() if stream.usage) > 0
    judge(fleet, True)
