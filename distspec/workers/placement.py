"""Where the actors of a pool go: one placement group per pool, one bundle per worker.

The groups are detached, so that a coordinator's death does not take the workers along. Whoever ends a fleet removes
them. Where a coordinator and its owner were both killed nobody does: the workers' leases lapse, and the groups stay
until the next fleet of that name uses or replaces them, or `fleet.shutdown` is called with that name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray
from ray import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from distspec.config import Config, Pool
from distspec.errors import FleetError
from distspec.workers.names import POOLS, actor_name


@dataclass(frozen=True, slots=True)
class _Found:
    group: PlacementGroup
    bundles: list[dict[str, float]]
    strategy: str


class Placement:
    """The placement groups of a fleet, made on first use and found again by a later coordinator."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._groups: dict[str, PlacementGroup] = {}

    def reserve(self) -> None:
        """Ask for room for all pools: by the groups that are there, if they are as wanted, or by new ones."""
        there = _groups(self._config.name)
        for name in POOLS:
            pool: Pool = getattr(self._config.pools, name)
            bundles = [_bundle(pool)] * pool.replicas if _bundle(pool) else []
            found = there.get(name)
            if found and (found.bundles, found.strategy) == (bundles, self._config.pools.placement_strategy):
                self._groups[name] = found.group
                continue
            if found:
                remove_placement_group(found.group)
            if bundles:
                self._groups[name] = self._make(name, bundles)

    def wait(self, timeout_s: float) -> None:
        """Until there is room. Raises FleetError that says what did not fit."""
        for name, group in self._groups.items():
            if not group.wait(timeout_s):
                pool = getattr(self._config.pools, name)
                has = ray.cluster_resources()  # type: ignore[no-untyped-call]
                raise FleetError(f"pools.{name}: no room for {pool.replicas} x {_bundle(pool)}; the cluster has {has}")

    def options(self, worker: str) -> dict[str, Any]:
        """Ray options of a worker's actor: resources and where they are taken from."""
        name, _, index = worker.partition(":")
        pool: Pool = getattr(self._config.pools, name)
        options: dict[str, Any] = {
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            "resources": dict(pool.resources),
        }
        group = self._groups.get(name)
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, int(index))
        elif "SPREAD" in self._config.pools.placement_strategy:
            options["scheduling_strategy"] = "SPREAD"
        return options

    def release(self) -> None:
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()

    def _make(self, pool: str, bundles: list[dict[str, float]]) -> PlacementGroup:
        made: PlacementGroup = placement_group(
            bundles,
            strategy=self._config.pools.placement_strategy,
            name=_group_name(self._config.name, pool),
            lifetime="detached",
        )
        return made


def release(fleet: str) -> None:
    """Remove the groups of a fleet, whoever made them; what runs in them ends."""
    for found in _groups(fleet).values():
        remove_placement_group(found.group)


def _groups(fleet: str) -> dict[str, _Found]:
    """By pool. Not by Ray's look-up of names, which sees only groups that this job's namespace made."""
    pools = {_group_name(fleet, pool): pool for pool in POOLS}
    return {
        pools[entry["name"]]: _Found(
            PlacementGroup(PlacementGroupID.from_hex(key)),
            [bundle for _, bundle in sorted(entry["bundles"].items())],
            entry["strategy"],
        )
        for key, entry in placement_group_table().items()
        if entry["name"] in pools and entry["state"] != "REMOVED"
    }


def _group_name(fleet: str, pool: str) -> str:
    return f"{actor_name(fleet, pool)}:placement"


def _bundle(pool: Pool) -> dict[str, float]:
    """What one worker holds; a group of empty bundles is no group, so workers that ask for nothing have none."""
    wanted = {"CPU": pool.num_cpus, "GPU": pool.num_gpus, **pool.resources}
    return {name: amount for name, amount in wanted.items() if amount}
