"""The coordinator's actor: hub, machine and loop, and the supervision of the workers.

One task per worker sees to it that its actor lives, is initialized and joined, and begins its next life when one
ended. A new coordinator finds the workers of the one before by name and takes them over under a higher term. The
fleet's owner renews its lease; when that lapses, or on `stop`, it ends the workers and itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from typing import Any

import ray

from distspec import heap
from distspec.config import Config
from distspec.coordinator.context import Settings
from distspec.coordinator.journal import Journal
from distspec.coordinator.loop import Loop
from distspec.coordinator.machine import Machine
from distspec.coordinator.observe import Observer
from distspec.errors import FleetError
from distspec.metrics import Family
from distspec.protocol.channel import Hub
from distspec.protocol.keys import Endpoint, FleetKeys
from distspec.trace import Span, Trace
from distspec.workers.crew import Crew
from distspec.workers.fingerprint import package
from distspec.workers.lease import FleetLease, end_unless_claimed
from distspec.workers.logs import tell
from distspec.workers.mirror import Mirror
from distspec.workers.names import node_address

log = logging.getLogger(__name__)
_MIRROR_S = 5.0


class Coordinator:
    """All methods may be called by anyone who holds the handle; `initialize` comes first.

    unclaimed_s: how long it waits for that before it ends.
    """

    def __init__(self, unclaimed_s: float) -> None:
        self._unclaimed = end_unless_claimed(unclaimed_s)
        self._config: Config | None = None
        self._started: asyncio.Task[None] | None = None
        self._endings = AsyncExitStack()

    async def initialize(self, config: Config) -> bool:
        """Start the fleet, or wait until another caller has. False: it runs with another configuration.

        Raises FleetError or what a worker raised; the fleet then has not started.
        """
        if self._config is not None and config != self._config:
            return False
        if self._started is None:
            self._config = config
            self._lease = FleetLease(config.coordinator.lease_s, what="coordinator", last=self._endings.aclose)
            # Longer than an owner waits for the start, so that it hears why one failed.
            self._lease.renew(2 * config.coordinator.start_timeout_s + config.coordinator.lease_s)
            self._unclaimed.cancel()
            self._started = asyncio.create_task(self._try_start(config))
        await asyncio.shield(self._started)
        return True

    async def renew(self) -> None:
        """The owner still wants this fleet."""
        self._running()
        self._lease.renew()

    async def endpoint(self) -> Endpoint:
        """Where clients connect, once the fleet has started."""
        self._running()
        return self._endpoint

    async def status(self) -> dict[str, Any]:
        """Plain values: the machine's snapshot, and for each worker what its supervisor knows."""
        config = self._running()
        return {
            "name": config.name,
            "model": config.served_name,
            **self._machine.snapshot(),
            "supervision": self._crew.report(),
        }

    async def trace(self) -> list[Span]:
        self._running()
        return self._observer.spans()

    async def metrics(self) -> list[Family]:
        self._running()
        return self._metrics()

    async def drain(self, worker: str) -> None:
        """Move the work of `pool:index` elsewhere and give it none."""
        self._running()
        workers = self._machine.snapshot()["workers"]
        if worker not in workers:
            raise FleetError(f"no worker {worker} has joined; there are {', '.join(sorted(workers)) or 'none'}")
        self._loop.drain(worker)

    async def stop(self) -> None:
        """End the workers; the caller then ends this actor."""
        if self._started is not None:
            self._started.cancel()
            await asyncio.gather(self._started, return_exceptions=True)
            await self._endings.aclose()

    def _running(self) -> Config:
        if self._config is None or self._started is None or not self._started.done():
            raise FleetError("the fleet is starting")
        self._started.result()
        return self._config

    async def _try_start(self, config: Config) -> None:
        try:
            await self._start(config)
        except BaseException:
            await self._endings.aclose()
            raise

    async def _start(self, config: Config) -> None:
        tell()
        beat = config.coordinator
        self._crew = Crew(config)
        self._endings.push_async_callback(self._crew.dismiss)
        term = await self._crew.assemble()
        settings = _settings(config)
        journal = Journal(beat.journal, beat.journal_mb << 20, settings, term) if beat.journal else None
        hub = Hub(FleetKeys.create(), term, heartbeat_s=beat.heartbeat_s, timeout_s=beat.worker_timeout_s)
        self._machine = Machine(settings, term)
        self._observer = Observer(Trace())
        self._loop = Loop(
            self._machine,
            hub,
            self._crew,
            self._observer,
            heartbeat_s=beat.heartbeat_s,
            fingerprint=package(),
            failed=_end,
            journal=journal,
        )
        self._endpoint = hub.start(self._loop, node_address())
        self._loop.start()
        self._endings.callback(hub.close)
        self._endings.callback(self._loop.close)
        await self._crew.supervise(self._endpoint, self._loop.expect)
        self._lease.renew()
        mirroring = asyncio.create_task(Mirror(config.name).follow(self._metrics, _MIRROR_S))
        self._endings.callback(mirroring.cancel)
        heap.settle()
        log.info("fleet %s runs, term %d", config.name, term)

    def _metrics(self) -> list[Family]:
        return self._observer.metrics(self._machine.snapshot())


def _end(error: Exception) -> None:
    """End this life at once: whoever keeps the fleet begins the next, which asks clients and workers anew."""
    log.critical("this coordinator cannot go on: %s: %s", type(error).__name__, error)
    os._exit(1)


def _settings(config: Config) -> Settings:
    spec, beat = config.speculation, config.coordinator
    return Settings(
        policy=spec.policy,
        allowed_policies=config.policies,
        local_drafts=spec.placement == "local",
        features=config.reads_features,
        steps=_steps(spec.num_speculative_tokens),
        topk=spec.topk,
        nodes=None if spec.num_draft_tokens is None else spec.num_draft_tokens - 1,
        lookahead=spec.lookahead,
        branch_topk=spec.branch_topk,
        branch_width=spec.branch_width,
        max_live_nodes=spec.max_live_nodes or config.engine.max_scratch_nodes,
        branch_nodes=spec.branch_nodes,
        static=spec.tree == "static",
        quick=spec.fallback != "none",
        synthetic=spec.synthetic_acceptance is not None,
        room=config.engine.max_scratch_nodes,
        max_queued_requests=beat.max_queued_requests,
        task_timeout_s=beat.task_timeout_s,
    )


def _steps(asked: int | dict[int, int] | None) -> int | tuple[tuple[int, int], ...] | None:
    return tuple(sorted(asked.items())) if isinstance(asked, dict) else asked


def remote_coordinator() -> Any:
    """The Ray actor class."""
    return ray.remote(num_cpus=0)(Coordinator)
