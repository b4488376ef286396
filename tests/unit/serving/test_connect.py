"""What stops before any actor starts, and what the endpoints are told while a fleet has no coordinator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from distspec import Fleet
from distspec.config import Config, Engine, Model, Speculation, load
from distspec.errors import ConfigError, FleetError, InvalidValue, ModelNotFound, Unavailable
from distspec.metrics import Family
from distspec.models import random_model, save_pretrained
from distspec.serving import connect
from distspec.serving.connect import Connection
from distspec.serving.service import Service
from distspec.workers.fleet import FleetHandle
from tests.shapes import LLAMA


class Deserted(FleetHandle):
    """A handle of a fleet whose coordinator died and has no successor yet."""

    async def status(self) -> dict[str, object]:
        raise FleetError("the coordinator died")

    async def metrics(self) -> list[Family]:
        raise FleetError("the coordinator died")


async def test_health_and_metrics_are_unavailable_without_a_coordinator(service: Service) -> None:
    connection = Connection(service, Deserted("fleet"))
    assert await connection.health() == "the coordinator died"
    with pytest.raises(Unavailable, match="the coordinator died"):
        await connection.metrics()


# -- before any actor starts --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, a drafter of its vocabulary, and one of another."""
    made = tmp_path_factory.mktemp("models")
    for name, vocab_size in (("target", 101), ("drafter", 101), ("stranger", 103)):
        shape = replace(LLAMA, vocab_size=vocab_size)
        save_pretrained(random_model(shape, seed=1, dtype=torch.float32, device=torch.device("cpu")), made / name)
    return {path.name: str(path) for path in made.iterdir()}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations for which actors would have been started."""
    started: list[Config] = []
    monkeypatch.setattr(connect.fleet, "launch", started.append)
    return started


def configuration(folders: dict[str, str], drafter: str | None = None, **model: Any) -> Config:
    speculation: dict[str, Any] = {"placement": "local"}
    if drafter is not None:
        speculation |= {"drafter": "standalone", "draft_model": folders[drafter]}
    return load({"model": {"name": folders["target"], **model}, "speculation": speculation})


def test_what_the_models_cannot_do_stops_before_any_actor_starts(
    folders: dict[str, str], launched: list[Config]
) -> None:
    with pytest.raises(InvalidValue, match=r"^model\.max_model_len: got 257, need at most 256"):
        connect.launch(configuration(folders, max_model_len=257))
    with pytest.raises(ConfigError, match=r"^speculation\.draft_model: .*103 token ids"):
        connect.launch(configuration(folders, "stranger"))
    with pytest.raises(ModelNotFound, match=r"looked in: .*nowhere"):
        connect.launch(configuration(folders | {"target": "/nowhere"}))
    with pytest.raises(ModelNotFound, match=r"looked in: .*nowhere"):
        connect.launch(configuration(folders | {"drafter": "/nowhere"}, "drafter"))
    assert not launched


def test_what_the_models_can_do_is_launched(folders: dict[str, str], launched: list[Config]) -> None:
    connect.launch(configuration(folders, "drafter", max_model_len=256))
    assert len(launched) == 1


@pytest.mark.parametrize(
    ("made", "path"),
    [
        (Config(engine=Engine(page_size=0), speculation=Speculation(placement="local")), "engine.page_size"),
        (Config(model=Model(dtype="int3"), speculation=Speculation(placement="local")), "model.dtype"),  # type: ignore[arg-type]
        (Config(), "pools.draft.replicas"),
    ],
)
def test_a_configuration_made_by_hand_is_checked_as_a_file_is(made: Config, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fleet(made)
    assert caught.value.path == path


def test_overrides_reach_a_configuration_made_by_hand() -> None:
    fleet = Fleet(load("local"), ["engine.page_size=8"])
    fleet.close()
    assert fleet.config == load("local", ["engine.page_size=8"])
