"""A worker is what its configuration says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from distspec.config import Config, Ngram, load
from distspec.drafters.base import DraftRow, Proposal
from distspec.drafters.ngram import NgramDrafter
from distspec.models import save_pretrained
from distspec.protocol.messages import Draft, Drafted, Fault, Hello, Progress
from distspec.protocol.values import SamplingParams, Shape
from distspec.workers import assembly
from distspec.workers.assembly import build
from distspec.workers.draft import DraftWork
from distspec.workers.target import TargetWork
from tests.desks import Ticks, lease, model, plain

PROMPT = (1, 2, 3, 4, 5)
PARAMS = SamplingParams(max_tokens=33, seed=5, prompt_tokens=len(PROMPT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_pretrained(model(), made)
    return made


def config(folder: Path, acceptance: str) -> Config:
    speculation = {
        "placement": "local",
        "drafter": "standalone",
        "draft_model": str(folder),
        "acceptance": acceptance,
        "allowed_policies": ["ar", "sd"],
        "num_speculative_tokens": 3,
    }
    engine = {"num_pages": 64, "max_num_seqs": 2, "device": "cpu"}
    return load({"model": {"name": str(folder), "dtype": "float32"}, "engine": engine, "speculation": speculation})


@pytest.mark.parametrize("acceptance", ["coupled", "ratio", "block"])
def test_drafts_are_made_and_judged_by_the_configured_rule(folder: Path, acceptance: str) -> None:
    """A target that drafts for itself agrees with itself, under either noise, as long as both have the same."""
    work = build(config(folder, acceptance), "decode:0", 1, lambda action: None).work
    assert isinstance(work, TargetWork)
    replies = list(work.receive(lease(1, PROMPT, PARAMS, shape=Shape(steps=3), nodes=3)))
    while work.ready():
        replies += work.step()
    said = [reply for reply in replies if isinstance(reply, Progress)]
    tokens = [token for reply in said for token in reply.tokens]
    assert sum(map(sum, (reply.accepted for reply in said))) == 24
    assert len(tokens) == 33
    assert (tokens == plain(PROMPT, PARAMS)) == (acceptance == "coupled")


def test_a_draft_worker_whose_device_broke_ends_its_life_and_one_whose_drafter_broke_does_not() -> None:
    """Else it would answer that it has no drafts, for ever."""
    lost: list[str] = []

    def prove() -> None:
        if lost:
            raise RuntimeError(lost[0])

    class Broken(NgramDrafter):
        def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
            raise ZeroDivisionError

    work = DraftWork(Broken(Ngram(), max_model_len=64), Ticks(), prove=prove)
    draft = Draft(request=1, epoch=0, task=0, keep=0, tokens=PROMPT, shape=Shape(steps=2), params=PARAMS)
    work.receive(draft)
    assert [type(said) for said in work.step()] == [Fault, Drafted]
    lost.append("an illegal memory access")
    work.receive(draft)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        work.step()


def test_a_worker_on_a_cpu_can_compute(folder: Path) -> None:
    build(config(folder, "coupled"), "decode:0", 1, lambda action: None).prove()


class Stopped(Exception):
    """With the device that a worker was to be made on."""


@pytest.fixture
def on_a_gpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*parts: object) -> tuple[TargetWork, Hello]:
        raise Stopped(next(part.type for part in parts if isinstance(part, torch.device)))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(assembly, "target_work", stop)
    monkeypatch.setattr(assembly, "draft_work", stop)


def device_of(pool: str, *asked: str) -> str:
    with pytest.raises(Stopped) as caught:
        build(load("local", asked), f"{pool}:0", 1, lambda action: None)
    return str(caught.value)


@pytest.mark.parametrize("pool", ["prefill", "decode", "verify", "draft"])
def test_a_worker_takes_a_gpu_only_if_its_pool_asks_for_one(on_a_gpu_host: None, pool: str) -> None:
    """One that asks for none sees all of Ray's: each such worker would take the first, and plan with all of it."""
    others = [f"pools.{name}.num_gpus=1" for name in ("prefill", "decode", "verify", "draft") if name != pool]
    assert device_of(pool, *others) == "cpu"
    assert device_of(pool, f"pools.{pool}.num_gpus=0.5") == "cuda"
    assert device_of(pool, "engine.device=cuda") == "cuda"
    assert device_of(pool, "engine.device=cpu", f"pools.{pool}.num_gpus=1") == "cpu"


def test_a_gpu_that_is_asked_for_and_not_found_is_told_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = config(folder, "coupled")
    asked = msgspec.structs.replace(made, engine=msgspec.structs.replace(made.engine, device="auto"))
    decode = msgspec.structs.replace(asked.pools.decode, num_gpus=1.0)
    asked = msgspec.structs.replace(asked, pools=msgspec.structs.replace(asked.pools, decode=decode))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        build(asked, "decode:0", 1, lambda action: None).prove()
    assert "torch finds none" in caplog.text
