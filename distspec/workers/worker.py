"""The actor of every pool: a work on its compute thread, joined to the coordinator's channel.

Light to create; `initialize` loads, `join` begins a life. It never rejoins by itself: the coordinator sees that
a life ended and starts the next one, so both always mean the same. Ray is only asked where this process is.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import time
from collections.abc import Sequence
from functools import partial

import msgspec
import ray
import torch

from distspec import models
from distspec.config import Config
from distspec.drafters import make
from distspec.engine import Engine
from distspec.errors import FleetError, LinkLost
from distspec.protocol.channel import Link
from distspec.protocol.keys import Endpoint
from distspec.protocol.messages import Fault, Hello, Message
from distspec.rounds.desk import Desk
from distspec.transfer.base import End
from distspec.transfer.collective import Collective
from distspec.transfer.group import Gloo, Group, Nccl, Store
from distspec.transfer.meeting import Place
from distspec.workers.compute import Compute, Later
from distspec.workers.draft import DraftWork
from distspec.workers.fingerprint import fingerprint
from distspec.workers.lease import FleetLease
from distspec.workers.names import actor, actor_name, node_address
from distspec.workers.target import TargetWork

log = logging.getLogger(__name__)
_DRAFTED_AT_ONCE = 256
"""Requests that a draft worker takes on; a drafter forgets the oldest where its room ends."""


class Worker:
    """One worker of a fleet: prefill, decode and verify workers do the same, draft workers draft."""

    def __init__(self) -> None:
        self._config: Config | None = None
        self._hello: Hello | None = None
        self._link: Link | None = None
        self._transport: Collective | None = None
        self._term = 0

    def where(self) -> str:
        """The Ray node that this worker runs on."""
        return str(ray.get_runtime_context().get_node_id())

    async def initialize(self, config: Config, worker: str, threads: int) -> None:
        """Load what the role needs; once. worker: `pool:index`. threads: torch's, in this process; -n shares
        the host's cores among n such workers.

        Raises ConfigError, ModelNotFound, or what the device says.
        """
        self._loop = asyncio.get_running_loop()
        if self._hello is not None:
            return
        if self._config is not None:
            raise FleetError(f"{worker} is being initialized")
        self._config = config
        beat = config.coordinator
        self._lease = FleetLease(beat.lease_s, what=worker, heard_s=lambda: self._link.heard_s if self._link else 0.0)
        self._lease.renew(beat.start_timeout_s)
        try:
            self._hello = await asyncio.to_thread(self._build, config, worker, threads)
        except BaseException:
            self._config = None
            raise

    async def join(self, endpoint: Endpoint, incarnation: int) -> None:
        """Begin a life in this term. Raises LinkLost, FleetError if a later term was seen."""
        if self._hello is None or self._config is None:
            raise FleetError("not initialized")
        if endpoint.term < self._term:
            raise FleetError(f"term {endpoint.term} is over, this is {self._term}")
        self._term = endpoint.term
        self._lease.renew()
        if self._link is not None:
            self._link.close()
        hello = msgspec.structs.replace(self._hello, incarnation=incarnation)
        timeout_s = self._config.coordinator.worker_timeout_s
        self._link = Link(
            endpoint, hello, incarnation, arrived=self._compute.take, lost=self._lost, timeout_s=timeout_s
        )
        self._compute.join_as(self._link)
        await self._link.open()

    def term(self) -> int:
        """The last coordinator life that this worker served."""
        return self._term

    async def place(self) -> Place:
        """Where its peers meet it."""
        if self._transport is None:
            raise FleetError("no target worker")
        return self._transport.place

    async def check(self) -> None:
        """Prove the books of a target worker that is idle. Raises AssertionError."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def check() -> tuple[()]:
            try:
                if isinstance(self._work, TargetWork):
                    self._work.check()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)
            return ()

        self._compute.later(check)
        await asyncio.wrap_future(done)

    # -- loading, on a thread of its own ---------------------------------------------------------

    def _build(self, config: Config, worker: str, threads: int) -> Hello:
        torch.set_num_threads(threads if threads > 0 else max(1, len(os.sched_getaffinity(0)) // -threads))
        role = worker.partition(":")[0]
        device = _device(config)
        built = self._draft(config, worker, device) if role == "draft" else self._target(config, worker, device)
        self._compute = Compute(self._work, self._reply, self._broke)
        self._compute.start()
        return msgspec.structs.replace(built, fingerprint=fingerprint(config, device), node=node_address())

    def _target(self, config: Config, worker: str, device: torch.device) -> Hello:
        role = worker.partition(":")[0]
        model = models.load_model(config.model.name, dtype=getattr(torch, config.model.dtype), device=device)
        engine = Engine(model, config.engine, device=device, max_model_len=config.model.max_model_len)
        local = config.speculation.placement == "local" and role == "decode"
        drafter = make(config, max_model_len=engine.max_model_len, device=device) if local else None
        desk = Desk(engine, drafter, max_num_batched_tokens=config.engine.max_num_batched_tokens, clock=time.time)
        self._transport = _transport(config, worker, device)
        self._work: TargetWork | DraftWork = TargetWork(engine, desk, self._transport, self._later)
        return Hello(
            worker=worker,
            role=role,
            incarnation=0,
            fingerprint={},
            slots=engine.slots,
            capacity=engine.capacity,
            page_size=engine.page_size,
            max_model_len=engine.max_model_len,
            vocab_size=model.config.vocab_size,
            step_cost=engine.measure(),
            drafts=drafter is not None,
        )

    def _draft(self, config: Config, worker: str, device: torch.device) -> Hello:
        shape = models.ModelConfig.from_pretrained(models.model_folder(config.model.name))
        longest = config.model.max_model_len or shape.max_position
        drafter = make(config, max_model_len=longest, device=device)
        if drafter is None:
            raise FleetError(f"{worker}: speculation.drafter is `none`")
        self._work = DraftWork(drafter, time.time)
        return Hello(
            worker=worker,
            role="draft",
            incarnation=0,
            fingerprint={},
            slots=_DRAFTED_AT_ONCE,
            capacity=_DRAFTED_AT_ONCE * longest,
            page_size=config.engine.page_size,
            max_model_len=longest,
            vocab_size=shape.vocab_size,
            drafts=True,
        )

    # -- between the event loop and the compute thread -----------------------------------------------

    def _later(self, action: Later) -> None:
        self._compute.later(action)

    def _reply(self, link: Link, messages: Sequence[Message]) -> None:
        self._loop.call_soon_threadsafe(partial(link.send, *messages))

    def _broke(self, link: Link, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._end, link, f"{type(error).__name__}: {error}")

    def _end(self, link: Link, reason: str) -> None:
        link.send(Fault(reason=reason))
        self._loop.call_soon(link.close)  # after the frame has left; the coordinator sees the link end

    def _lost(self, error: LinkLost) -> None:
        log.warning("link to the coordinator lost: %s", error)


def _device(config: Config) -> torch.device:
    wanted = config.engine.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def _transport(config: Config, worker: str, device: torch.device) -> Collective:
    host = node_address()
    timeout_s = config.coordinator.worker_timeout_s

    def make_group(store: Store, rank: int) -> Group:
        if _is_nccl(config, device):
            return Nccl(store, rank, device=device, timeout_s=timeout_s)
        return Gloo(store, rank, host=host, timeout_s=timeout_s)

    def place_of(end: End) -> Place:
        found = ray.get(actor(actor_name(config.name, end.worker)).place.remote(), timeout=timeout_s)
        assert isinstance(found, Place)
        return found

    return Collective(worker, host, make_group, place_of, timeout_s=timeout_s)


def _is_nccl(config: Config, device: torch.device) -> bool:
    """The same answer in every worker. NCCL refuses two ranks on one GPU, so each must have its own."""
    if config.transfer != "auto":
        return config.transfer == "nccl"
    pools = (config.pools.prefill, config.pools.decode, config.pools.verify)
    return device.type == "cuda" and all(pool.num_gpus >= 1 for pool in pools if pool.replicas)
