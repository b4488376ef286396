"""Real actors on a tiny model: they answer, survive deaths with the same tokens, and none is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from distspec.config import Config, load
from distspec.errors import FleetError, InvalidField, ModelNotFound
from distspec.protocol.values import SamplingParams, SpeculationChoice
from distspec.workers import fleet as fleets
from distspec.workers.client import Client
from distspec.workers.coordinator import remote_coordinator
from distspec.workers.fleet import FleetHandle
from distspec.workers.names import actor, actor_name
from distspec.workers.worker import Worker

pytestmark = pytest.mark.usefixtures("cluster")

PROMPTS = [tuple((7 * i + 3 * j) % 97 for j in range(5 + 9 * i)) for i in range(4)]


def configuration(folder: Path, name: str, **changes: Any) -> Config:
    tree: dict[str, Any] = {
        "name": name,
        "model": {"name": str(folder), "max_model_len": 512},
        "engine": {"num_pages": 256, "page_size": 4, "max_num_seqs": 8, "num_threads": 1},
        "speculation": {"policy": "sd", "drafter": "ngram", "placement": "pool"},
        "coordinator": {"heartbeat_s": 0.2, "worker_timeout_s": 2.0, "lease_s": 15.0},
        "pools": {pool: {"replicas": 1} for pool in ("prefill", "decode", "verify", "draft")},
    }
    for key, value in changes.items():
        tree[key] = {**tree[key], **value}
    return load(tree)


@pytest.fixture(scope="module")
def handle(cluster: None, tiny_model: Path) -> Iterator[FleetHandle]:
    made = fleets.launch(configuration(tiny_model, "four-pools"))
    yield made
    made.shutdown()


@asynccontextmanager
async def client_of(handle: FleetHandle) -> AsyncIterator[Client]:
    client = handle.client(patience_s=60.0)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def tokens_of(
    client: Client, prompt: tuple[int, ...], policy: str | None = None, on_token: Callable[[int], None] | None = None,
    **params: Any,
) -> list[int]:  # fmt: skip
    params = {"max_tokens": 40, "seed": 5, "temperature": 1.0, **params}
    tokens: list[int] = []
    async for output in client.submit(prompt, SamplingParams(**params), SpeculationChoice(policy=policy)):
        assert output.start == len(tokens)
        tokens += output.tokens
        if on_token:
            on_token(len(tokens))
    assert output.finish_reason == "length"
    assert output.usage is not None
    assert output.usage.completion_tokens == len(tokens) == params["max_tokens"]
    return tokens


async def all_tokens(client: Client, **params: Any) -> list[list[int]]:
    return list(await asyncio.gather(*(tokens_of(client, prompt, **params) for prompt in PROMPTS)))


def kill(handle: FleetHandle, worker: str) -> None:
    ray.kill(actor(actor_name(handle.name, worker)))


async def until(condition: Callable[[], Any], limit_s: float = 240.0) -> None:
    deadline = time.monotonic() + limit_s
    while not (await condition() if asyncio.iscoroutinefunction(condition) else condition()):
        assert time.monotonic() < deadline, "did not come to pass"
        await asyncio.sleep(0.1)


async def idle(handle: FleetHandle) -> None:
    """Wait until no request is held anywhere, then prove every worker's books."""

    async def nothing() -> bool:
        status = await handle.status()
        alive = all(worker["state"] == "joined" for worker in status["supervision"].values())
        return alive and not status["requests"] and not any(w["open"] for w in status["workers"].values())

    async def proven() -> bool:
        if not await nothing():
            return False
        try:
            for worker in (await handle.status())["workers"]:
                await asyncio.wait_for(actor(actor_name(handle.name, worker)).check.remote(), 30)
        except (FleetError, RayActorError):
            return False  # it was killed a moment ago, which nobody has noticed yet
        return True

    await until(proven)


def test_actors_tell_in_the_logs_of_ray_what_they_are(handle: FleetHandle) -> None:
    here = ray.get_runtime_context()
    files = Path(here.get_temp_dir(), here.get_session_name(), "logs").glob("worker-*.err")
    told = [path.read_text() for path in files]
    assert [text.count("fleet four-pools runs, term 1") for text in told if "fleet four-pools" in text] == [1]
    pages = "256 KV pages of 4 positions on cpu"  # workers of other fleets that were here have other numbers
    workers = [text.count(pages) for text in told if pages in text]
    assert len(workers) >= 3
    assert set(workers) == {1}


async def test_policies_and_seeds_decide_tokens_as_they_should(handle: FleetHandle) -> None:
    async with client_of(handle) as client:
        expected = await all_tokens(client, policy="ar")
        for policy in ("sd", "pearl", "dsi", "ssd", "bvsp", "auto"):
            assert await all_tokens(client, policy=policy) == expected
        assert await all_tokens(client, seed=6) != expected
        greedy = await all_tokens(client, temperature=0.0)
        assert await all_tokens(client, temperature=0.0, seed=9, policy="dsi") == greedy
    await idle(handle)


async def test_work_really_ran_in_all_four_pools(handle: FleetHandle) -> None:
    async with client_of(handle) as client:
        await all_tokens(client, policy="sd")
        await all_tokens(client, policy="dsi")
    spans = await handle.trace()
    seen = {(span.track.partition(":")[0], span.name) for span in spans}
    assert {("prefill", "prefill"), ("draft", "draft"), ("coordinator", "commit")} <= seen
    assert {"decode", "verify"} <= {track for track, _ in seen}
    assert ("decode", "transfer") in seen
    families = {family.name: family for family in await handle.metrics()}
    assert families["distspec_generated_tokens_total"].samples[0].value >= 320


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.needs("linux")
async def test_an_idle_worker_costs_no_cpu(handle: FleetHandle) -> None:
    await idle(handle)
    workers = list((await handle.status())["workers"])
    pids = {name: await asyncio.to_thread(pid_of, actor_name(handle.name, name)) for name in workers}
    assert {name.partition(":")[0] for name in pids} == {"prefill", "decode", "verify", "draft"}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    await asyncio.sleep(3)
    used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    assert max(used.values()) < 0.05 * 3, used


async def test_requests_that_cannot_be_served_are_refused_with_their_field(handle: FleetHandle) -> None:
    async with client_of(handle) as client:
        for prompt, params, field in (
            ((), {}, "prompt"),
            ((96, 97), {}, "prompt"),
            ((1,) * 600, {}, "prompt"),
            ((1, 2), {"max_tokens": 0}, "max_tokens"),
        ):
            with pytest.raises(InvalidField) as caught:
                await tokens_of(client, prompt, **params)
            assert caught.value.field == field
        with pytest.raises(InvalidField) as caught:
            await tokens_of(client, (1, 2), policy="warp")
        assert caught.value.field == "speculation.policy"


async def test_a_stream_that_is_closed_and_a_client_that_vanishes_free_everything(handle: FleetHandle) -> None:
    async with client_of(handle) as client:
        stream = client.submit(PROMPTS[1], SamplingParams(max_tokens=400, seed=1))
        await anext(stream)
        await stream.aclose()
        await idle(handle)
        others = [client.submit(prompt, SamplingParams(max_tokens=400, seed=1)) for prompt in PROMPTS]
        await asyncio.gather(*(anext(other) for other in others))
    await idle(handle)


@pytest.mark.parametrize("worker", ["verify:0", "draft:0", "decode:0", "prefill:0"])
@pytest.mark.parametrize("policy", ["sd", "dsi"])
async def test_a_worker_that_dies_costs_no_request(handle: FleetHandle, worker: str, policy: str) -> None:
    async with client_of(handle) as client:
        expected = await all_tokens(client, max_tokens=120, policy="ar")
        killed = False

        def once(count: int) -> None:
            nonlocal killed
            if not killed and count > 10:
                killed = True
                kill(handle, worker)

        assert await all_tokens(client, max_tokens=120, policy=policy, on_token=once) == expected
        assert killed
    await idle(handle)


def pid_of(name: str) -> int:
    return int(ray.get(actor(name).__ray_call__.remote(lambda worker: os.getpid()), timeout=30))


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_coordinator_that_dies_or_freezes_costs_no_request(handle: FleetHandle, stop: signal.Signals) -> None:
    async with client_of(handle) as client:
        expected = await all_tokens(client, max_tokens=150, policy="ar")
        term = (await handle.status())["term"]
        pid = await asyncio.to_thread(pid_of, actor_name(handle.name, "coordinator"))
        stopped = False

        def once(count: int) -> None:
            nonlocal stopped
            if not stopped and count > 10:
                stopped = True
                os.kill(pid, stop)

        try:
            assert await all_tokens(client, max_tokens=150, policy="sd", on_token=once) == expected
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert stopped
    assert (await handle.status())["term"] == term + 1
    await idle(handle)


async def test_a_coordinator_that_dies_with_a_frozen_worker_costs_no_request(handle: FleetHandle) -> None:
    """The others go on as they are: the next coordinator comes before their leases lapse."""
    async with client_of(handle) as client:
        expected = await all_tokens(client, max_tokens=150, policy="ar")
        coordinator, worker = [
            await asyncio.to_thread(pid_of, actor_name(handle.name, one)) for one in ("coordinator", "verify:0")
        ]
        others = [actor_name(handle.name, one) for one in ("prefill:0", "decode:0", "draft:0")]
        lives = [await asyncio.to_thread(pid_of, other) for other in others]
        lost = False

        def once(count: int) -> None:
            nonlocal lost
            if not lost and count > 10:
                lost = True
                os.kill(worker, signal.SIGSTOP)
                os.kill(coordinator, signal.SIGKILL)

        try:
            assert await all_tokens(client, max_tokens=150, policy="dsi", on_token=once) == expected
            assert lost
            await idle(handle)
            assert [await asyncio.to_thread(pid_of, other) for other in others] == lives
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGCONT)


async def test_a_worker_that_freezes_is_replaced_and_costs_no_request(handle: FleetHandle) -> None:
    async with client_of(handle) as client:
        expected = await all_tokens(client, max_tokens=120, policy="ar")
        pid = await asyncio.to_thread(pid_of, actor_name(handle.name, "decode:0"))
        frozen = False

        def once(count: int) -> None:
            nonlocal frozen
            if not frozen and count > 10:
                frozen = True
                os.kill(pid, signal.SIGSTOP)

        try:
            assert await all_tokens(client, max_tokens=120, policy="sd", on_token=once) == expected
            await idle(handle)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert await asyncio.to_thread(pid_of, actor_name(handle.name, "decode:0")) != pid


def living(name: str) -> list[str]:
    return [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].startswith(f"{name}:")]


async def test_a_fleet_that_nobody_renews_ends_by_itself(tiny_model: Path) -> None:
    config = configuration(
        tiny_model,
        "lapsing",
        coordinator={"lease_s": 1.5},
        pools={"verify": {}, "prefill": {}, "draft": {"replicas": 1}},
    )
    made = await asyncio.to_thread(fleets.launch, config)
    assert len(await asyncio.to_thread(living, "lapsing")) == 3
    made.close()
    await until(lambda: not living("lapsing"))
    with pytest.raises(FleetError):
        await made.status()


async def test_actors_that_nobody_initializes_end_and_those_of_a_fleet_stay(handle: FleetHandle) -> None:
    options = {"namespace": "distspec", "lifetime": "detached"}
    for name, kind in (("worker", ray.remote(Worker)), ("coordinator", remote_coordinator())):
        kind.options(name=f"unclaimed:{name}", **options).remote(1.0)
    await until(lambda: not living("unclaimed"))
    for name in living(handle.name):
        assert not ray.get(actor(name).__ray_call__.remote(lambda one: one._unclaimed.is_alive()), timeout=30)


async def test_workers_without_a_coordinator_end_by_themselves(tiny_model: Path) -> None:
    config = configuration(tiny_model, "orphans", coordinator={"lease_s": 1.5}, pools={"verify": {}, "prefill": {}})
    made = await asyncio.to_thread(fleets.launch, config)
    made.close()
    kill(made, "coordinator")
    await until(lambda: not living("orphans"))


async def test_a_shut_down_fleet_leaves_nothing(tiny_model: Path) -> None:
    config = configuration(tiny_model, "brief", pools={"decode": {"replicas": 1, "num_cpus": 0.5}, "verify": {}})
    made = await asyncio.to_thread(fleets.launch, config)
    await asyncio.to_thread(made.shutdown)
    await until(lambda: not living("brief"))
    groups = [group for group in ray.util.placement_group_table().values() if group["name"].startswith("brief:")]
    assert [group["state"] for group in groups] == ["REMOVED"]
    fleets.shutdown("brief")


def test_what_cannot_start_says_why_and_leaves_nothing(tiny_model: Path) -> None:
    missing = configuration(tiny_model, "missing", model={"name": "/nowhere/at/all"})
    with pytest.raises(ModelNotFound, match="/nowhere/at/all"):
        fleets.launch(missing)
    greedy = configuration(
        tiny_model, "greedy", pools={"decode": {"replicas": 1, "num_cpus": 999}}, coordinator={"start_timeout_s": 3.0}
    )
    with pytest.raises(FleetError, match=r"pools\.decode"):
        fleets.launch(greedy)
    assert living("missing") == living("greedy") == []
