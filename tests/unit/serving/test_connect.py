"""What the endpoints are told while a fleet has no coordinator."""

from __future__ import annotations

import pytest

from distspec.errors import FleetError, Unavailable
from distspec.metrics import Family
from distspec.serving.connect import Connection
from distspec.serving.service import Service
from distspec.workers.fleet import FleetHandle


class Deserted(FleetHandle):
    """A handle of a fleet whose coordinator died and has no successor yet."""

    async def status(self) -> dict[str, object]:
        raise FleetError("the coordinator died")

    async def metrics(self) -> list[Family]:
        raise FleetError("the coordinator died")


async def test_health_and_metrics_are_unavailable_without_a_coordinator(service: Service) -> None:
    connection = Connection(service, Deserted("fleet"))
    assert await connection.health() == "the coordinator died"
    with pytest.raises(Unavailable, match="the coordinator died"):
        await connection.metrics()
