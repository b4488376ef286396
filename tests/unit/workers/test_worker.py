"""A worker's actor, without Ray: what it refuses before it loads anything."""

from __future__ import annotations

import pytest

from distspec.config import load
from distspec.errors import FleetError
from distspec.protocol.keys import FleetKeys
from distspec.protocol.messages import Hello
from distspec.workers.worker import Worker

HELLO = Hello("decode:0", "decode", 0, {}, slots=1, capacity=64, page_size=16, max_model_len=32, vocab_size=11)


async def test_a_worker_left_behind_by_another_configuration_is_not_taken_over() -> None:
    worker = Worker(600.0)
    worker._unclaimed.cancel()
    plain = ["speculation.policy=ar"]  # which drafter=none wants
    worker._config = load("colocated", plain)
    loaded = ("engine.page_size=4", "model.dtype=bfloat16", "speculation.drafter=none", "pools.decode.num_gpus=1")
    for override in loaded:
        other = load("colocated", [override, *plain])
        with pytest.raises(FleetError, match="another configuration"):
            await worker.initialize(other, "decode:0", 1)
    more = load("colocated", [*plain, "pools.decode.replicas=2", "pools.verify.num_gpus=1", "server.port=9000"])
    with pytest.raises(FleetError, match="being initialized"):
        await worker.initialize(more, "decode:0", 1)


async def test_a_life_begins_only_where_the_device_computes() -> None:
    """Its coordinator ends a process that cannot begin one, and makes another: CUDA forgives some errors to nobody."""
    worker, said = Worker(600.0), ["CUDA error: an illegal memory access was encountered"]
    worker._unclaimed.cancel()
    worker._config, worker._hello = load("colocated"), HELLO

    def prove() -> None:
        if said:
            raise RuntimeError(said[0])

    worker._prove = prove
    endpoint = FleetKeys.create().endpoint("tcp://127.0.0.1:9", term=1)
    with pytest.raises(FleetError, match="illegal memory access"):
        await worker.join(endpoint, 1)
    assert worker.term() == 0
    said.clear()
    worker._term = 2
    with pytest.raises(FleetError, match="term 1 is over"):
        await worker.join(endpoint, 1)
