"""The room of a fleet's pools, as a real Ray keeps it: found again or replaced, and none is left. No actor runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from distspec.config import load
from distspec.errors import FleetError
from distspec.workers import fleet
from distspec.workers.placement import Placement

pytestmark = pytest.mark.usefixtures("cluster")
WANTED = ("name=placed", "pools.decode.replicas=2", "pools.decode.num_cpus=0.5")


def reserve(*overrides: str) -> dict[str, Any]:
    """Groups of the fleet after a coordinator of this configuration has reserved its room."""
    made = Placement(load("colocated", [*WANTED, *overrides]))
    made.reserve()
    made.wait(60)
    return groups()


def groups() -> dict[str, Any]:
    """By id: those that hold room or ask for it."""
    table = ray.util.placement_group_table().items()
    return {key: entry for key, entry in table if entry["name"][:7] == "placed:" and entry["state"] != "REMOVED"}


@pytest.fixture(autouse=True)
def _end(cluster: None) -> Iterator[None]:
    """Without a coordinator, as after its death."""
    yield
    fleet.shutdown("placed")
    assert not groups()


def test_a_later_coordinator_finds_the_same_room() -> None:
    first = reserve()
    assert len(first) == 1
    assert reserve().keys() == first.keys()


@pytest.mark.parametrize(
    ("change", "bundles"),
    [
        ("pools.decode.replicas=3", [{"CPU": 0.5}] * 3),
        ("pools.decode.replicas=1", [{"CPU": 0.5}]),
        ("pools.decode.num_cpus=0.25", [{"CPU": 0.25}] * 2),
        ("pools.placement_strategy=SPREAD", [{"CPU": 0.5}] * 2),
        ("pools.decode.num_cpus=0", None),
    ],
)
def test_room_that_is_not_as_wanted_is_replaced(change: str, bundles: list[dict[str, float]] | None) -> None:
    first = reserve()
    second = reserve(change)
    assert not first.keys() & second.keys()
    assert [list(entry["bundles"].values()) for entry in second.values()] == ([bundles] if bundles else [])


def test_what_does_not_fit_is_said_and_can_be_asked_for_differently() -> None:
    made = Placement(load("colocated", [*WANTED, "pools.decode.num_cpus=999"]))
    made.reserve()
    with pytest.raises(FleetError, match=r"pools\.decode: no room for 2 x"):
        made.wait(0)
    assert len(reserve()) == 1
