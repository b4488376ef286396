"""The Ray cluster that a command or script runs on: one that exists, or one of its own.

Knows how Ray is started quietly, and by which names fleets are found. Does not know what fleets do.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from distspec.errors import FleetError
from distspec.serving.signals import held_back
from distspec.workers.names import COORDINATOR, NAMESPACE, actor_name
from distspec.workers.reach import refuse_unreachable


def whose(address: str | None) -> str:
    """The address of the cluster that `cluster` would join, or "local" for one of its own."""
    return address or os.environ.get("RAY_ADDRESS") or "local"


@contextmanager
def cluster(address: str | None = None) -> Iterator[None]:
    """Ray, for as long as the context lasts.

    address None: Ray as this process has initialised it already, or where RAY_ADDRESS points, or else started
    here and ended with the context, with every process in it. Raises FleetError.
    """
    if address is None and ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    there = whose(address)
    if there != "local":
        refuse_unreachable(there)
    try:
        # Torn off, it leaves processes for a minute, and this one crashes when it ends. It also takes SIGTERM for
        # itself, by which it ends this process with a native stack trace, its cluster left behind.
        with held_back():
            ray.init(
                address=there,
                include_dashboard=False if there == "local" else None,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        hint = "" if "RAY_AUTH_MODE" in os.environ else " (if it wants a token: RAY_AUTH_MODE=token, see Ray's docs)"
        raise FleetError(f"Ray at {address or 'this machine'}: {error}{hint}") from None
    try:
        yield
    finally:
        with held_back():
            ray.shutdown()


def only_fleet() -> str:
    """The name of the fleet that runs on this cluster. Raises FleetError if there is none or several."""
    suffix = actor_name("", COORDINATOR)
    named = ray.util.list_named_actors(all_namespaces=True)
    fleets: list[str] = sorted(
        actor["name"].removesuffix(suffix)
        for actor in named
        if actor["namespace"] == NAMESPACE and actor["name"].endswith(suffix)
    )
    if len(fleets) == 1:
        return fleets[0]
    several = f"several fleets run on this Ray cluster, --name one of them: {', '.join(fleets)}"
    raise FleetError(several if fleets else "no fleet runs on this Ray cluster")
