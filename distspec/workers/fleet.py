"""A fleet from outside: launch it, attach to it, ask it, end it.

Its actors are named and detached, so they outlive whoever launched them by the length of the lease. An owner
renews the lease from a thread of its own, and makes a new coordinator where the old one died or froze.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from typing import Any, get_args

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from distspec.config import Config, Role
from distspec.errors import DistspecError, FleetError
from distspec.metrics import Family
from distspec.protocol.keys import Endpoint
from distspec.trace import Span
from distspec.workers.client import Client
from distspec.workers.names import COORDINATOR, NAMESPACE, actor, actor_name
from distspec.workers.placement import release

log = logging.getLogger(__name__)
_ASK_S = 10.0


class FleetHandle:
    """Questions to a fleet; they raise FleetError while it has no coordinator. Made by `launch` or `attach`."""

    def __init__(self, name: str, keeper: Keeper | None = None) -> None:
        self.name = name
        self._keeper = keeper

    async def endpoint(self) -> Endpoint:
        found = await self._ask("endpoint")
        assert isinstance(found, Endpoint)
        return found

    async def status(self) -> dict[str, Any]:
        """Term, queue, counters; `workers`, `requests`, and `supervision` by worker."""
        return dict(await self._ask("status"))

    async def trace(self) -> list[Span]:
        return list(await self._ask("trace"))

    async def metrics(self) -> list[Family]:
        return list(await self._ask("metrics"))

    async def drain(self, worker: str) -> None:
        """Move the work of `pool:index` elsewhere, and give it none."""
        await self._ask("drain", worker)

    def client(self, *, patience_s: float = 60.0) -> Client:
        """A client, to be started on the caller's event loop."""
        return Client(self.endpoint, patience_s=patience_s)

    def close(self) -> None:
        """Stop renewing the lease. A fleet that nobody else renews ends when its lease lapses."""
        if self._keeper is not None:
            self._keeper.stop()

    def shutdown(self) -> None:
        """End the fleet now, whoever else uses it."""
        self.close()
        shutdown(self.name)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            handle = await asyncio.to_thread(actor, actor_name(self.name, COORDINATOR))
            reference = getattr(handle, method).remote(*arguments)
            return await asyncio.wait_for(asyncio.wrap_future(reference.future()), _ASK_S)
        except RayTaskError as error:
            raise _cause(error) from None
        except TimeoutError:
            raise FleetError(f"the coordinator of {self.name} does not answer") from None
        except RayActorError:
            raise FleetError(f"the coordinator of {self.name} died") from None
        except RayError as error:
            raise FleetError(f"Ray could not ask the coordinator of {self.name}: {error}") from None


class Keeper(threading.Thread):
    """Renews the lease of a fleet, and starts the next coordinator where one is gone."""

    def __init__(self, config: Config) -> None:
        super().__init__(name=f"keeper of {config.name}", daemon=True)
        self._config = config
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        beat = self._config.coordinator
        while not self._stopped.wait(min(beat.heartbeat_s, beat.lease_s / 4)):
            try:
                self._renew()
            except Exception as error:  # Ray itself may be away for a while; the lease decides how long
                log.warning("fleet %s: %s", self._config.name, error)

    def _renew(self) -> None:
        beat = self._config.coordinator
        try:
            handle = actor(actor_name(self._config.name, COORDINATOR))
            ray.get(handle.renew.remote(), timeout=beat.worker_timeout_s)
            return
        except GetTimeoutError:
            log.warning("the coordinator of %s is silent and is replaced", self._config.name)
            ray.kill(handle)
        except (FleetError, RayActorError, RayTaskError) as error:
            log.warning("the coordinator of %s is gone: %s", self._config.name, str(error).splitlines()[0])
        if not self._stopped.is_set():
            start(self._config)


def launch(config: Config) -> FleetHandle:
    """Start the fleet of this configuration, or join it where it runs, and keep it until `close`.

    Blocks until its workers have joined, or, where it takes over from a coordinator that died, until the next one
    runs; ray must be initialized. Raises FleetError, ConfigError or ModelNotFound.
    """
    _tell_of_idle_gpus(config)
    start(config)
    keeper = Keeper(config)
    keeper.start()
    return FleetHandle(config.name, keeper)


def _tell_of_idle_gpus(config: Config) -> None:
    """A fleet that asks for no GPU is slow where there are some; from servers elsewhere, people expect that they are
    taken. Told here, since what workers log is in files."""
    count = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
    if count and config.engine.device == "auto" and not any(map(config.asks_for_gpu, get_args(Role))):
        log.warning(
            "fleet %s computes on CPUs: the cluster has %g GPUs, and no pool asks for one "
            "(pools.decode.num_gpus=1 does; engine.device=cpu says that this is meant)",
            config.name,
            count,
        )


def attach(name: str) -> FleetHandle:
    """A handle of a running fleet, which it does not keep. Raises FleetError if there is none."""
    actor(actor_name(name, COORDINATOR))
    return FleetHandle(name)


def shutdown(name: str) -> None:
    """End a fleet: workers, placement groups, coordinator. One that does not run is fine."""
    with suppress(FleetError):
        _stop(name, actor(actor_name(name, COORDINATOR)))
    release(name)  # those that a coordinator left behind which could not stop


def _stop(name: str, coordinator: Any) -> None:
    try:
        ray.get(coordinator.stop.remote(), timeout=_ASK_S)
    except (RayActorError, RayTaskError, GetTimeoutError) as error:
        log.warning("fleet %s did not stop by itself; its lease ends it: %s", name, error)
    ray.kill(coordinator)


def start(config: Config) -> None:
    """Make sure that a coordinator runs. Raises as `launch`."""
    from distspec.workers.coordinator import remote_coordinator

    handle = (
        remote_coordinator()
        .options(
            name=actor_name(config.name, COORDINATOR),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
        )
        .remote(2 * config.coordinator.start_timeout_s)
    )
    try:
        fits = ray.get(handle.initialize.remote(config), timeout=2 * config.coordinator.start_timeout_s)
    except RayTaskError as error:
        ray.kill(handle)
        raise _cause(error) from None
    except GetTimeoutError:
        ray.kill(handle)
        raise FleetError(f"fleet {config.name} did not start within {config.coordinator.start_timeout_s:g} s") from None
    except RayActorError as error:
        raise FleetError(f"the coordinator of {config.name} died: {error}") from None
    if not fits:
        raise FleetError(f"fleet {config.name} runs already with another configuration; give this one another name")


def _cause(error: RayTaskError) -> DistspecError:
    """The error that an actor raised, as itself where it is ours."""
    cause = error.cause
    return cause if isinstance(cause, DistspecError) else FleetError(str(error).strip().splitlines()[-1])
