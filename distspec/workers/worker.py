"""The actor of every pool: a work on its compute thread, joined to the coordinator's channel.

Light to create; `initialize` loads, `join` begins a life. It never rejoins by itself: the coordinator sees that
a life ended and starts the next one, so both always mean the same. Ray is only asked where this process is.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
import ray

from distspec import heap
from distspec.config import Config, Pool
from distspec.errors import FleetError, LinkLost
from distspec.protocol.channel import Link
from distspec.protocol.keys import Endpoint
from distspec.protocol.messages import Fault, Hello
from distspec.transfer.meeting import Place
from distspec.workers.compute import Compute, Later
from distspec.workers.lease import FleetLease, end_unless_claimed
from distspec.workers.logs import tell
from distspec.workers.threads import spin_briefly

log = logging.getLogger(__name__)


class Worker:
    """One worker of a fleet: prefill, decode and verify workers do the same, draft workers draft.

    unclaimed_s: how long it waits for `initialize` before it ends.
    """

    def __init__(self, unclaimed_s: float) -> None:
        self._unclaimed = end_unless_claimed(unclaimed_s)
        self._config: Config | None = None
        self._hello: Hello | None = None
        self._link: Link | None = None
        self._place: Place | None = None
        self._term = 0

    def where(self) -> str:
        """The Ray node that this worker runs on."""
        return str(ray.get_runtime_context().get_node_id())

    async def initialize(self, config: Config, worker: str, threads: int) -> None:
        """Load what the role needs; once. worker: `pool:index`. threads: torch's, in this process; -n shares
        the host's cores among n such workers.

        Raises ConfigError, ModelNotFound, what the device says, or FleetError if it was made from another
        configuration, as one that a coordinator of the same name left behind.
        """
        self._loop = asyncio.get_running_loop()
        if self._config is not None and _made_from(config, worker) != _made_from(self._config, worker):
            raise FleetError(f"{worker} was made from another configuration")
        if self._hello is not None:
            return
        if self._config is not None:
            raise FleetError(f"{worker} is being initialized")
        self._config = config
        beat = config.coordinator
        self._lease = FleetLease(beat.lease_s, what=worker, heard_s=lambda: self._link.heard_s if self._link else 0.0)
        self._lease.renew(beat.start_timeout_s)
        self._unclaimed.cancel()
        try:
            await asyncio.to_thread(self._build, config, worker, threads)
            self._lease.renew()
        except BaseException:
            self._config = None
            raise

    async def join(self, endpoint: Endpoint, incarnation: int) -> None:
        """Begin a life in this term. Raises LinkLost, FleetError if a later term was seen, or where this process can
        compute no more: then only another one can take its place."""
        if self._hello is None or self._config is None:
            raise FleetError("not initialized")
        try:
            await asyncio.to_thread(self._prove)
        except Exception as error:
            raise FleetError(f"its device computes no more: {error}") from None
        if endpoint.term < self._term:
            raise FleetError(f"term {endpoint.term} is over, this is {self._term}")
        self._term = endpoint.term
        self._lease.renew()
        if self._link is not None:
            self._link.close()
        hello = msgspec.structs.replace(self._hello, incarnation=incarnation)
        timeout_s = self._config.coordinator.worker_timeout_s
        self._link = Link(
            endpoint,
            hello,
            incarnation,
            arrived=self._compute.take,
            lost=self._lost,
            timeout_s=timeout_s,
            wake=self._compute.wake,
        )
        self._compute.join_as(self._link)
        await self._link.open()

    def term(self) -> int:
        """The last coordinator life that this worker served."""
        return self._term

    async def place(self) -> Place:
        """Where its peers meet it."""
        if self._place is None:
            raise FleetError("no target worker, or not yet")
        return self._place

    async def check(self) -> None:
        """Prove the books of this worker. Raises AssertionError."""
        await asyncio.wrap_future(self._compute.check())

    def _build(self, config: Config, worker: str, threads: int) -> None:
        tell()
        spin_briefly()
        from distspec.workers.assembly import build  # torch and all that: not for the coordinator, who makes us

        built = build(config, worker, threads, self._later, self._is_called)

        def begin() -> None:
            built.begin()
            heap.settle()

        self._compute = Compute(built.work, Link.say, self._broke, begin)
        self._compute.start()
        self._place, self._prove, self._hello = built.place, built.prove, built.hello

    # -- between the event loop and the compute thread -----------------------------------------------

    def _later(self, action: Later) -> None:
        self._compute.later(action)

    def _is_called(self) -> bool:
        return self._compute.is_called()

    def _broke(self, link: Link, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._end, link, f"{type(error).__name__}: {error}")

    def _end(self, link: Link, reason: str) -> None:
        link.send(Fault(reason=reason))
        self._loop.call_soon(link.close)  # after the frame has left; the coordinator sees the link end

    def _lost(self, error: LinkLost) -> None:
        log.warning("link to the coordinator lost: %s", error)


def _made_from(config: Config, worker: str) -> tuple[object, ...]:
    """What a worker loaded and keeps, where and in how much room; the rest of a configuration is the coordinator's."""
    pool: Pool = getattr(config.pools, worker.partition(":")[0])
    return config.model, config.engine, config.speculation, config.transfer, pool.num_gpus
