"""What the actors of a fleet are called, and how to reach them by name."""

from __future__ import annotations

from typing import Any

import ray

from distspec.config import Config
from distspec.errors import FleetError

NAMESPACE = "distspec"
COORDINATOR = "coordinator"
POOLS = ("prefill", "decode", "verify", "draft")


def worker_names(config: Config) -> list[str]:
    """`pool:index` of all workers that a configuration asks for."""
    return [f"{pool}:{i}" for pool in POOLS for i in range(getattr(config.pools, pool).replicas)]


def actor_name(fleet: str, worker: str) -> str:
    return f"{fleet}:{worker}"


def node_address() -> str:
    """The address of this host that other hosts of the cluster reach it by."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def actor(name: str) -> Any:
    """Handle of the living actor of that name. Raises FleetError."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        raise FleetError(f"no actor {name} in this Ray cluster; is the fleet running?") from None
