"""The workers of a fleet, as their coordinator keeps them: created, initialized, joined, and again.

Knows actors and lives. Does not know requests: that a worker left, the machine is told by the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from distspec.config import MODEL_DRAFTERS, Config
from distspec.errors import DistspecError, FleetError
from distspec.protocol.keys import Endpoint
from distspec.workers.names import NAMESPACE, actor, actor_name, worker_names
from distspec.workers.placement import Placement
from distspec.workers.worker import Worker

log = logging.getLogger(__name__)
_CALL_S = 10.0
"""How long a living actor may take to answer a small call; one that is being created gets start_timeout_s."""
_BACKOFF_S = (0.2, 30.0)


@dataclass(slots=True)
class _Member:
    name: str
    actor: Any = None
    node: str = ""
    lives: int = 0
    state: str = "absent"
    trouble: str = ""
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class Crew:
    """A Watcher of the loop. All methods belong to the coordinator's event loop."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._placement = Placement(config)
        self._members = {name: _Member(name) for name in worker_names(config)}
        self._remote = ray.remote(Worker)
        self._takes_over = False
        self._tasks: list[asyncio.Task[None]] = []

    async def assemble(self) -> int:
        """Find the workers of the coordinator before, or create all. Returns the term: above all they have seen."""
        await asyncio.to_thread(self._placement.reserve)
        members = self._members.values()
        term = max(await asyncio.gather(*(self._meet(member) for member in members)))
        self._takes_over = term > 0
        if not self._takes_over:
            timeout_s = self._config.coordinator.start_timeout_s
            await asyncio.to_thread(self._placement.wait, timeout_s)
            await asyncio.gather(*(self._find(member, timeout_s) for member in members if member.actor is None))
        return term + 1

    async def supervise(self, endpoint: Endpoint, expect: Callable[[str, int], None]) -> None:
        """Bring all up, then keep them up in the background. Raises what the first one raised that could not.

        In a fleet that ran before, requests wait: nobody waits there for workers that were lost with the coordinator.
        """
        self._endpoint, self._expect = endpoint, expect
        members = list(self._members.values())
        if not self._takes_over:
            await asyncio.gather(*(self._bring_up(member) for member in members))
        self._tasks = [asyncio.create_task(self._keep_up(member)) for member in members]

    async def dismiss(self) -> None:
        """End all workers and give their room back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self._members.values():
            self._kill(member)
        self._placement.release()

    def report(self) -> dict[str, dict[str, Any]]:
        return {
            m.name: {"state": m.state, "node": m.node, "lives": m.lives, "trouble": m.trouble}
            for m in self._members.values()
        }

    def joined(self, worker: str, incarnation: int) -> None:
        self._members[worker].state = "joined"

    def left(self, worker: str, incarnation: int, reason: str) -> None:
        member = self._members[worker]
        if incarnation == self._incarnation(member):
            member.state, member.trouble = "left", reason
            member.gone.set()

    async def _keep_up(self, member: _Member) -> None:
        """Begin the next life whenever one ended, more and more patiently while that fails."""
        backoff_s = _BACKOFF_S[0]
        while True:
            if member.state == "joined":
                await member.gone.wait()
            if member.lives and not self._config.coordinator.restart_workers:
                return
            try:
                await self._bring_up(member)
                backoff_s = _BACKOFF_S[0]
            except Exception as error:  # whatever ails it, the others go on
                member.trouble = str(error).splitlines()[0] if str(error) else type(error).__name__
                log.warning("%s does not come up: %s", member.name, member.trouble)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _BACKOFF_S[1])

    async def _bring_up(self, member: _Member) -> None:
        """Actor, model, channel. An actor that does not answer is replaced at the next try."""
        beat = self._config.coordinator
        try:
            if member.actor is None:
                await self._find(member, beat.start_timeout_s)
            else:
                # Loading may take minutes; whether a frozen actor is there at all must not.
                await _answer(member.actor.where.remote(), beat.worker_timeout_s)
            member.state = "loading"
            await _answer(
                member.actor.initialize.remote(self._config, member.name, self._share(member)), beat.start_timeout_s
            )
            member.state = "joining"
            member.gone.clear()
            member.lives += 1
            incarnation = self._incarnation(member)
            self._expect(member.name, incarnation)
            await _answer(member.actor.join.remote(self._endpoint, incarnation), beat.worker_timeout_s + _CALL_S)
        except BaseException:
            self._kill(member)
            raise

    async def _meet(self, member: _Member) -> int:
        """The term that a worker has seen which is there already. 0: there is none; one that is silent is ended."""
        timeout_s = self._config.coordinator.worker_timeout_s
        try:
            member.actor = await asyncio.to_thread(actor, actor_name(self._config.name, member.name))
            member.node = await _answer(member.actor.where.remote(), timeout_s)
            return int(await _answer(member.actor.term.remote(), timeout_s))
        except (FleetError, RayActorError) as error:
            log.info("%s is to be created: %s", member.name, error)
            self._kill(member)
            return 0

    async def _find(self, member: _Member, timeout_s: float) -> None:
        """Get or create a worker's actor, and wait until it runs."""
        member.state = "starting"
        options = {
            "name": actor_name(self._config.name, member.name),
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            **self._placement.options(member.name),
        }
        unclaimed_s = 2 * self._config.coordinator.start_timeout_s
        member.actor = await asyncio.to_thread(lambda: self._remote.options(**options).remote(unclaimed_s))
        try:
            member.node = await _answer(member.actor.where.remote(), timeout_s)
        except RayActorError:
            if member.lives:
                raise
            member.lives += 1  # one that died with the coordinator before; its name is free now
            await self._find(member, timeout_s)

    def _kill(self, member: _Member) -> None:
        if member.actor is not None:
            ray.kill(member.actor)
        member.actor, member.state = None, "absent"

    def _incarnation(self, member: _Member) -> int:
        """Unique over all terms, so that peers may name each other by it."""
        return (self._endpoint.term << 32) + member.lives

    def _share(self, member: _Member) -> int:
        """Torch threads of a worker, or -n: the cores of its host divided among the n workers there that compute."""
        configured = self._config.engine.num_threads
        if configured:
            return configured
        tenants = [m for m in self._members.values() if m.node == member.node and self._computes(m)]
        return -max(1, len(tenants))

    def _computes(self, member: _Member) -> bool:
        return not member.name.startswith("draft") or self._config.speculation.drafter in MODEL_DRAFTERS


async def _answer(reference: Any, timeout_s: float) -> Any:
    """What an actor answers. Raises its own error, FleetError for silence, RayActorError if it is dead."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), timeout_s)
    except TimeoutError:
        raise FleetError(f"an actor did not answer within {timeout_s:g} s") from None
    except RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, DistspecError) else FleetError(str(error).strip().splitlines()[-1]) from None
