"""What coordinator and channel add to a round: all that is real but the work, which takes no time.

Knows two processes: a coordinator (hub, loop, machine), and this one with the workers (link, compute thread) and a
client. Does not know models or Ray; no actor is created.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median

from distspec.bench.report import Row, machine, row
from distspec.bench.toy import WORKERS, ToyWorker
from distspec.coordinator.context import Settings
from distspec.coordinator.loop import Loop
from distspec.coordinator.machine import Machine
from distspec.coordinator.observe import Observer
from distspec.protocol.channel import Hub
from distspec.protocol.keys import Endpoint, FleetKeys
from distspec.protocol.messages import Output
from distspec.protocol.values import SamplingParams, SpeculationChoice
from distspec.trace import Trace
from distspec.workers.client import Client

BOUND_MS = 1.0
POLICIES = ("ar", "sd", "dsi")
FORWARD_S = 0.005
SLOW = f"sd+{1e3 * FORWARD_S:g}ms"
WIDTH = 4
_PROMPT = tuple(range(32))
_HEARTBEAT_S, _TIMEOUT_S = 1.0, 30.0


def measure(rounds: int, repetitions: int) -> list[Row]:
    """Milliseconds per round of one request, rows `overhead/{policy}`, against the bound of one millisecond.

    The last row is of `sd` as well, with workers that sleep for FORWARD_S in each step, as they do beside a GPU; its
    figure is what is left without that. Processors fall asleep meanwhile and caches forget, so it is what a round
    really loses. It has a quarter of the rounds.

    Time runs from the first output to the last, at the client. `sd` and `dsi` wait for a draft worker and for a
    verifier, so a round is two ways there and back. Leased rounds, those of `ar`, wait for nobody; here each waits
    until the client has the tokens of the one before, so the figure is how late these arrive.
    """
    with coordinator_process() as endpoint:
        times = asyncio.run(_measure(endpoint, rounds, repetitions))
    sizes = {"rounds": rounds, "repetitions": repetitions, "width": WIDTH, "workers": len(WORKERS)}
    context = machine("msgspec", "pyzmq") | sizes | {"reference": "bound"}
    return [row(f"overhead/{name}", median(found), "ms/round", BOUND_MS, context) for name, found in times.items()]


async def _measure(endpoint: Endpoint, rounds: int, repetitions: int) -> dict[str, list[float]]:
    async def find() -> Endpoint:
        return endpoint

    times: dict[str, list[float]] = {name: [] for name in (*POLICIES, SLOW)}
    workers = [ToyWorker(name) for name in WORKERS]
    for worker in workers:
        await worker.join(endpoint, _TIMEOUT_S)
    client = Client(find, timeout_s=_TIMEOUT_S)
    await client.start()
    try:
        for _ in range(repetitions):
            for policy in POLICIES:
                times[policy].append(await _run(client, workers, policy, rounds))
            times[SLOW].append(await _run(client, workers, "sd", max(2, rounds // 4), FORWARD_S))
    finally:
        await client.close()
        for worker in workers:
            worker.close()
    return times


async def _run(client: Client, workers: list[ToyWorker], policy: str, rounds: int, forward_s: float = 0.0) -> float:
    """Milliseconds per round of one stream, without those in which workers slept."""
    params = SamplingParams(max_tokens=rounds * (1 if policy == "ar" else WIDTH), temperature=0.0)
    for worker in workers:
        worker.work.forward_s = forward_s
    first_s = slept_s = 0.0
    last: Output | None = None
    async for output in client.submit(_PROMPT, params, SpeculationChoice(policy=policy)):
        if last is None:
            first_s, slept_s = time.perf_counter(), _slept_s(workers)
        last = output
        if policy == "ar":
            for worker in workers:
                worker.go()
    took_s = time.perf_counter() - first_s - (_slept_s(workers) - slept_s)
    assert last is not None
    assert last.usage is not None
    return 1e3 * took_s / last.usage.rounds


def _slept_s(workers: list[ToyWorker]) -> float:
    return sum(worker.work.busy_s for worker in workers)


@contextmanager
def coordinator_process() -> Iterator[Endpoint]:
    """A coordinator in a process of its own, which ends when our end of a pipe is closed."""
    spawn = multiprocessing.get_context("spawn")
    ours, its = spawn.Pipe()
    process = spawn.Process(target=_coordinate, args=(its,), daemon=True)
    process.start()
    its.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


def _coordinate(pipe: Connection) -> None:
    asyncio.run(_coordinator(pipe))


async def _coordinator(pipe: Connection) -> None:
    """The real coordinator without its actor; says its endpoint."""
    machine = Machine(Settings(steps=WIDTH), term=1)
    hub = Hub(FleetKeys.create(), 1, heartbeat_s=_HEARTBEAT_S, timeout_s=_TIMEOUT_S)
    loop = Loop(
        machine,
        hub,
        _Nobody(),
        Observer(Trace()),
        heartbeat_s=_HEARTBEAT_S,
        fingerprint={},
        failed=_fail,
    )
    for worker in WORKERS:
        loop.expect(worker, 1)
    endpoint = hub.start(loop)
    loop.start()
    pipe.send(endpoint)
    await _closed(pipe)
    loop.close()
    hub.close()


def _fail(error: Exception) -> None:
    raise error


async def _closed(pipe: Connection) -> None:
    """The other end was closed: nothing is ever sent this way."""
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), closed.set)
    await closed.wait()


class _Nobody:
    """Nobody restarts these workers."""

    def joined(self, worker: str, incarnation: int) -> None: ...

    def left(self, worker: str, incarnation: int, reason: str) -> None: ...
