"""Where the actors of a pool go: one placement group per pool, one bundle per worker."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from distspec.config import Config, Pool
from distspec.errors import FleetError
from distspec.workers.names import POOLS, actor_name


class Placement:
    """The placement groups of a fleet, made on first use and found again by a later coordinator."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._groups: dict[str, PlacementGroup] = {}

    def reserve(self, timeout_s: float) -> None:
        """Hold room for all pools. Raises FleetError that says what did not fit."""
        for name in POOLS:
            pool: Pool = getattr(self._config.pools, name)
            if pool.replicas and _bundle(pool):
                self._groups[name] = self._group(name, pool)
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

    def _group(self, pool_name: str, pool: Pool) -> PlacementGroup:
        name = f"{actor_name(self._config.name, pool_name)}:placement"
        try:
            found: PlacementGroup = ray.util.get_placement_group(name)
            return found
        except ValueError:
            bundles = [_bundle(pool) for _ in range(pool.replicas)]
            strategy = self._config.pools.placement_strategy
            made: PlacementGroup = placement_group(bundles, strategy=strategy, name=name, lifetime="detached")
            return made


def _bundle(pool: Pool) -> dict[str, float]:
    """What one worker holds; a group of empty bundles is no group, so workers that ask for nothing have none."""
    wanted = {"CPU": pool.num_cpus, "GPU": pool.num_gpus, **pool.resources}
    return {name: amount for name, amount in wanted.items() if amount}
