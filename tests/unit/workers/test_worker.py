"""A worker's actor, without Ray: what it refuses before it loads anything."""

from __future__ import annotations

import pytest

from distspec.config import load
from distspec.errors import FleetError
from distspec.workers.worker import Worker


async def test_a_worker_left_behind_by_another_configuration_is_not_taken_over() -> None:
    worker = Worker(600.0)
    worker._unclaimed.cancel()
    worker._config = load("colocated")
    for override in ("engine.page_size=4", "model.dtype=bfloat16", "speculation.drafter=none"):
        other = load("colocated", [override, "speculation.policy=ar"])
        with pytest.raises(FleetError, match="another configuration"):
            await worker.initialize(other, "decode:0", 1)
    more = load("colocated", ["pools.decode.replicas=2", "server.port=9000"])
    with pytest.raises(FleetError, match="being initialized"):
        await worker.initialize(more, "decode:0", 1)
