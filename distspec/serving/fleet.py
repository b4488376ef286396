"""`Fleet`: a fleet and a driver for it, from a configuration. What `from distspec import Fleet` gives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from distspec.config import Config, load
from distspec.serving.cluster import cluster
from distspec.serving.connect import connection
from distspec.serving.driver import Driver
from distspec.serving.service import Service


class Fleet(Driver):
    """Generates with the fleet of a configuration, which it launches unless it runs already.

        with Fleet("local", ["pools.verify.replicas=2"]) as fleet:
            [answer] = fleet.generate("The capital of France is", max_tokens=32, policy="dsi")
            for chunk in fleet.stream([{"role": "user", "content": "Hello"}], temperature=0):
                print(chunk.text, end="", flush=True)

    config, overrides: as `distspec.config.load`; a Config made by hand is checked as a file is. address: a running
    Ray cluster; None as in `serving.cluster`. Raises ConfigError at once, and FleetError or ModelNotFound when
    entered.
    """

    def __init__(
        self,
        config: Config | str | Path | Mapping[str, Any] = "local",
        overrides: Iterable[str] = (),
        *,
        address: str | None = None,
    ) -> None:
        self.config = load(msgspec.to_builtins(config) if isinstance(config, Config) else config, overrides)
        self._address = address
        self._cluster = ExitStack()
        super().__init__(self._service_of_the_fleet(), streams=max(1, self.config.coordinator.max_queued_requests))

    def start(self) -> None:
        # Ray belongs to the thread that asked for it, not to the driver's loop: its start blocks for seconds.
        self._cluster.enter_context(cluster(self._address))
        try:
            super().start()
        except BaseException:
            self._cluster.close()
            raise

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._cluster.close()

    def status(self) -> dict[str, Any]:
        """The coordinator's view: workers, requests, counters. Raises FleetError."""
        return self._wait(self._connection.handle.status())

    @asynccontextmanager
    async def _service_of_the_fleet(self) -> AsyncIterator[Service]:
        async with connection(self.config) as self._connection:
            yield self._connection.service
