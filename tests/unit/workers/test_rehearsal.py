"""A worker whose pool has no size yet is made twice: small, to see what its largest steps take, and then for good."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs

from distspec import config, models
from distspec.config import Config, load
from distspec.engine import Begun, Rolling, sizing
from distspec.kv.pool import KVPool
from distspec.models import save_pretrained
from distspec.models.draft_checkpoint import save_draft
from distspec.protocol.messages import Freed, Progress
from distspec.rounds import Desk, Reply
from distspec.workers.assembly import build
from tests.featured import made, target

Play = Callable[[config.Engine], Iterable[KVPool]]
PAGES = 77
SLOTS, SCRATCH, BUDGET = 3, 16, 48
CELLS = [
    ("none", "coupled", 1),
    ("ngram", "coupled", 1),
    ("standalone", "coupled", 1),
    ("standalone", "coupled", 2),
    ("standalone", "ratio", 1),
    ("eagle3", "coupled", 1),
    ("eagle3", "coupled", 2),
    ("eagle3", "block", 1),
    ("dflash", "coupled", 1),
]
REMOTE = [("standalone", 1), ("standalone", 2), ("eagle3", 2), ("dflash", 1)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp(name) for name in ("standalone", "eagle3", "dflash")}
    save_pretrained(target(), found["standalone"])
    for name in ("eagle3", "dflash"):
        save_draft(made(name), found[name])
    return found


def configured(folders: dict[str, Path], drafter: str, acceptance: str, topk: int, placement: str) -> Config:
    speculation = {
        "placement": placement,
        "drafter": drafter,
        "acceptance": acceptance,
        "policy": "ar" if drafter == "none" else "sd",
        "allowed_policies": ["ar", "sd"],
        "num_speculative_tokens": 3,
        "topk": topk,
    }
    if drafter in folders:
        speculation["draft_model"] = str(folders[drafter])
    engine = {"max_num_seqs": SLOTS, "max_scratch_nodes": SCRATCH, "max_num_batched_tokens": BUDGET, "device": "cpu"}
    model = {"name": str(folders["standalone"]), "dtype": "float32", "max_model_len": 150}
    part = {"replicas": 1, "num_gpus": 0.25}
    pools = {"prefill": part, "decode": part, "verify": part} | ({"draft": part} if drafter != "none" else {})
    tree = {"model": model, "engine": engine, "speculation": speculation, "pools": pools}
    return load(tree)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[KVPool]:
    """The pools that were rehearsed. There is no GPU whose memory could be looked at; all else is real."""
    found: list[KVPool] = []

    def sized(
        options: config.Engine, device: torch.device, *, share: float, longest: int, least: int, play: Play
    ) -> config.Engine:
        assert share == 0.9 * 0.25
        found.extend(play(structs.replace(options, num_pages=sizing.few(options))))
        return structs.replace(options, num_pages=PAGES)

    for worker in ("target", "draft"):
        monkeypatch.setattr(f"distspec.workers.assembly.{worker}.sized", sized)
    return found


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Reply]:
    """What desks answer."""
    found: list[Reply] = []

    class Heard(Desk):
        def receive(self, message: object) -> list[Reply]:
            replies = super().receive(message)  # type: ignore[arg-type]
            found.extend(replies)
            return replies

        def step(self) -> list[Reply]:
            replies = super().step()
            found.extend(replies)
            return replies

    monkeypatch.setattr("distspec.workers.assembly.target.Desk", Heard)
    return found


def check_pools(pools: list[KVPool], count: int) -> None:
    """Each was worked in."""
    assert len(pools) == count
    assert all(pool.data.count_nonzero() for pool in pools)


@pytest.mark.parametrize(("drafter", "acceptance", "topk"), CELLS)
def test_a_decode_worker_with_its_drafter(
    folders: dict[str, Path], played: list[KVPool], said: list[Reply], drafter: str, acceptance: str, topk: int
) -> None:
    """Requests in all slots, with and without drafts, get all their tokens; none is refused or fails."""
    worker = build(configured(folders, drafter, acceptance, topk, "local"), "decode:0", 1, lambda action: None)
    check_pools(played, 2 if drafter in folders else 1)
    assert {type(reply) for reply in said} == {Progress, Freed}
    progress = [reply for reply in said if isinstance(reply, Progress)]
    rounds = 2 if drafter == "none" else 4  # whole ones, and those in which the host has a part
    assert sum(len(reply.tokens) for reply in progress) == rounds * SLOTS * (sizing.SHORT - 4)
    assert worker.hello.capacity == PAGES * worker.hello.page_size
    assert worker.hello.max_model_len == 150


@pytest.mark.parametrize(("drafter", "drafts"), [("none", {0}), ("standalone", {0, 3})])
def test_rounds_in_which_the_host_has_a_part_are_rehearsed_in_all_slots(
    folders: dict[str, Path], played: list[KVPool], drafter: str, drafts: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep logits beside each other that whole rounds and ordinary steps do not."""
    begun: list[tuple[int, int]] = []
    begin = Rolling.begin

    def watched(self: Rolling, slots: Sequence[int], steps: int) -> Begun:
        begun.append((len(slots), steps))
        return begin(self, slots, steps)

    monkeypatch.setattr(Rolling, "begin", watched)
    build(configured(folders, drafter, "coupled", 1, "local"), "decode:0", 1, lambda action: None)
    assert {(SLOTS, steps) for steps in drafts} <= set(begun)


@pytest.mark.parametrize("longest", [150, BUDGET - 10])
@pytest.mark.parametrize(("drafter", "topk"), REMOTE)
def test_a_draft_worker(folders: dict[str, Path], played: list[KVPool], drafter: str, topk: int, longest: int) -> None:
    """It computes a text that fills a step, or one as long as a text with drafts may be."""
    asked = configured(folders, drafter, "coupled", topk, "pool")
    asked = structs.replace(asked, model=structs.replace(asked.model, max_model_len=longest))
    build(asked, "draft:0", 1, lambda action: None)
    check_pools(played, 1)
    written = int(played[0].data.count_nonzero(dim=(0, 1, 3, 4)).count_nonzero())
    # Features that are zeros leave zeros in the pool of a drafter that reads nothing else.
    assert drafter == "dflash" or written >= min(BUDGET, longest - 4) - 1


@pytest.mark.parametrize("role", ["prefill", "verify"])
def test_a_worker_that_only_judges(folders: dict[str, Path], played: list[KVPool], role: str) -> None:
    build(configured(folders, "standalone", "coupled", 1, "pool"), f"{role}:0", 1, lambda action: None)
    check_pools(played, 1)


@pytest.mark.parametrize(
    ("worker", "drafter", "loads"),
    [
        ("decode:0", "standalone", ["load_model", "load_model"]),  # target and drafter
        ("decode:0", "eagle3", ["load_model", "load_draft"]),
        ("draft:0", "standalone", ["load_model"]),
        ("draft:0", "eagle3", ["load_target", "load_draft"]),
    ],
)
def test_weights_are_loaded_once(
    folders: dict[str, Path],
    played: list[KVPool],
    worker: str,
    drafter: str,
    loads: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a drafter too: from a disk they take minutes."""
    found: list[str] = []

    def count(name: str) -> None:
        load = getattr(models, name)

        def counted(*args: object, **more: object) -> object:
            found.append(name)
            return load(*args, **more)

        monkeypatch.setattr(models, name, counted)

    for name in ("load_model", "load_target", "load_draft"):
        count(name)
    placement = "local" if worker == "decode:0" else "pool"
    build(configured(folders, drafter, "coupled", 1, placement), worker, 1, lambda action: None)
    assert played
    assert found == loads
