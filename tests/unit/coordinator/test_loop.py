"""The loop on real sockets: clients stream through it, peers that do not fit are refused, its journal replays."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from distspec.coordinator.context import Settings
from distspec.coordinator.events import Command, Event, Thought, Tick
from distspec.coordinator.journal import Journal, read
from distspec.coordinator.loop import Loop
from distspec.coordinator.machine import Machine
from distspec.coordinator.observe import Observer
from distspec.coordinator.planner import Planner
from distspec.coordinator.replay import replay
from distspec.errors import BadMessage, InvalidField, LinkLost, Unavailable
from distspec.protocol.channel import Hub, Link
from distspec.protocol.keys import Endpoint, FleetKeys
from distspec.protocol.messages import ClientWelcome, Hello, Message, Welcome
from distspec.protocol.values import SamplingParams, SpeculationChoice
from distspec.sim.drafter import SimDrafter
from distspec.sim.model import ToyModel
from distspec.sim.target import SimTarget
from distspec.trace import Trace
from distspec.workers.client import Client

MODEL = ToyModel(50)
PROMPTS = [tuple((7 * i + 3 * j) % 50 for j in range(3 + 4 * i)) for i in range(5)]


class Coordinator:
    """One life of a coordinator, and what it was told of workers that left."""

    def __init__(self, term: int = 1, journal: Journal | None = None, settings: Settings | None = None) -> None:
        self.lefts: list[tuple[str, int, str]] = []
        self.failures: list[Exception] = []
        self.trace = Trace()
        self.observer = Observer(self.trace)
        self.machine = Machine(settings or Settings(), term)
        self.hub = Hub(FleetKeys.create(), term, heartbeat_s=0.05, timeout_s=5.0)
        self.loop = Loop(
            self.machine,
            self.hub,
            self,
            self.observer,
            heartbeat_s=0.05,
            fingerprint={"distspec": "1"},
            failed=self.failures.append,
            journal=journal,
        )
        self.endpoint = self.hub.start(self.loop)
        self.loop.start()

    def joined(self, worker: str, incarnation: int) -> None: ...

    def left(self, worker: str, incarnation: int, reason: str) -> None:
        self.lefts.append((worker, incarnation, reason))

    def close(self) -> None:
        self.loop.close()
        self.hub.close()


class Worker:
    """A simulated worker behind a real link; it does one step of work per turn of the event loop."""

    def __init__(self, endpoint: Endpoint, name: str, incarnation: int = 1, **fingerprint: str) -> None:
        rng = Random(name)
        self._work: SimDrafter | SimTarget
        if name.startswith("draft"):
            self._work = SimDrafter(name, MODEL, rng, slots=64, accept=0.7, nonsense=0.1)
        else:
            self._work = SimTarget(name, MODEL, rng, None, pages=512, page_size=4, slots=8, room=64)
        hello = Hello(
            worker=name,
            role=name.partition(":")[0],
            incarnation=incarnation,
            fingerprint={"distspec": "1", "dtype": "float32", **fingerprint},
            slots=8,
            capacity=2048,
            page_size=4,
            max_model_len=500,
            vocab_size=50,
            drafts=name.startswith("draft"),
        )
        self.link = Link(endpoint, hello, incarnation, arrived=self._arrived, lost=lambda error: None, timeout_s=5.0)
        self._turn: asyncio.TimerHandle | None = None

    def _arrived(self, messages: list[Message]) -> None:
        for message in messages:
            self.link.send(*self._work.handle(message))
        if self._turn is None:
            self._step()

    def _step(self) -> None:
        if self._work.ready():
            self.link.send(*self._work.step())
        is_busy = self._work.ready()
        self._turn = asyncio.get_running_loop().call_later(0.001, self._step) if is_busy else None


class Fleet:
    def __init__(self) -> None:
        self.lives: list[Coordinator] = []
        self.clients: list[Client] = []
        self.workers: list[Worker] = []

    def coordinator(self, **given: Any) -> Coordinator:
        self.lives.append(Coordinator(term=len(self.lives) + 1, **given))
        return self.lives[-1]

    async def worker(self, name: str, incarnation: int = 1, **fingerprint: str) -> Worker:
        made = Worker(self.lives[-1].endpoint, name, incarnation, **fingerprint)
        self.workers.append(made)
        self.lives[-1].loop.expect(name, incarnation)
        await made.link.open()
        return made

    async def client(self, patience_s: float = 20.0) -> Client:
        async def find() -> Endpoint:
            return self.lives[-1].endpoint

        made = Client(find, timeout_s=1.0, patience_s=patience_s)
        self.clients.append(made)
        await made.start()
        return made


@pytest_asyncio.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = Fleet()
    yield made
    for client in made.clients:
        await client.close()
    for worker in made.workers:
        worker.link.close()
    for life in made.lives[-1:]:
        life.close()


def params(length: int = 30, seed: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=length, seed=seed, stop_token_ids=())


async def stream(client: Client, prompt: tuple[int, ...], policy: str | None = None, length: int = 30) -> list[int]:
    tokens: list[int] = []
    async for output in client.submit(prompt, params(length), SpeculationChoice(policy=policy)):
        tokens += output.tokens
    assert output.finish_reason == "length"
    return tokens


def plain(prompt: tuple[int, ...], length: int = 30) -> list[int]:
    return MODEL.plain(prompt, params(length))[0]


async def test_streams_are_the_plain_targets_whatever_the_policy(fleet: Fleet) -> None:
    life = fleet.coordinator()
    for name in ("decode:0", "verify:0", "draft:0"):
        await fleet.worker(name)
    client = await fleet.client()
    for policy in ("ar", "sd", "dsi"):
        found = await asyncio.gather(*(stream(client, prompt, policy) for prompt in PROMPTS))
        assert found == [plain(prompt) for prompt in PROMPTS]
    seen = {(span.track, span.name) for span in life.trace.spans()}
    assert {("draft:0", "draft"), ("coordinator", "commit"), ("decode:0", "verify")} <= seen


async def test_what_is_commanded_has_left_before_it_is_looked_at(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    life = fleet.coordinator()
    waiting: list[Message] = []

    def watch(*_: Any) -> None:
        waiting.extend(message for session in life.hub._sessions.values() for message in session.outbox)

    monkeypatch.setattr(life.observer, "handled", watch)
    for name in ("decode:0", "draft:0"):
        await fleet.worker(name)
    assert await stream(await fleet.client(), PROMPTS[0], "sd") == plain(PROMPTS[0])
    assert not [message for message in waiting if not isinstance(message, Welcome | ClientWelcome)]


async def test_nobody_waits_for_thoughts(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which there is no end here."""
    life = fleet.coordinator()
    thoughts: list[Event] = []
    handle = life.machine.handle

    def handled(event: Event, now_s: float) -> list[Command]:
        if isinstance(event, Thought):
            thoughts.append(event)
        return handle(event, now_s)

    monkeypatch.setattr(Machine, "has_thoughts", True)
    monkeypatch.setattr(life.machine, "handle", handled)
    for name in ("decode:0", "draft:0"):
        await fleet.worker(name)
    assert await stream(await fleet.client(), PROMPTS[0], "sd") == plain(PROMPTS[0])
    assert thoughts


async def test_a_thought_that_fails_ends_this_life(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    life, failed = fleet.coordinator(), asyncio.Event()
    monkeypatch.setattr(Machine, "has_thoughts", True)
    monkeypatch.setattr(Planner, "think", lambda *_: 1 / 0)
    monkeypatch.setattr(life.loop, "_failed", lambda error: failed.set())
    await fleet.worker("decode:0")
    await asyncio.wait_for(failed.wait(), 5.0)


async def test_streams_go_on_under_the_next_coordinator(fleet: Fleet) -> None:
    first = fleet.coordinator()
    await fleet.worker("decode:0")
    client = await fleet.client()
    begun = asyncio.Event()

    async def follow(prompt: tuple[int, ...]) -> list[int]:
        tokens: list[int] = []
        async for output in client.submit(prompt, params(300)):
            assert output.start == len(tokens)
            tokens += output.tokens
            if len(tokens) > 20:
                begun.set()
        return tokens

    streams = asyncio.gather(*(follow(prompt) for prompt in PROMPTS))
    await begun.wait()
    first.close()
    fleet.coordinator()
    await fleet.worker("decode:0")
    assert await streams == [plain(prompt, 300) for prompt in PROMPTS]


async def test_streams_fail_when_no_coordinator_comes_and_the_client_finds_a_late_one(fleet: Fleet) -> None:
    first = fleet.coordinator()
    await fleet.worker("decode:0")
    client = await fleet.client(patience_s=0.3)
    output = client.submit(PROMPTS[0], params(400))
    await anext(output)
    first.close()
    with pytest.raises(Unavailable):
        async for _ in output:
            pass
    fleet.coordinator()
    await fleet.worker("decode:0")
    while True:
        try:
            assert await stream(client, PROMPTS[0]) == plain(PROMPTS[0])
            return
        except Unavailable:
            await asyncio.sleep(0.05)


async def test_a_search_that_breaks_goes_on(fleet: Fleet) -> None:
    """Whatever `find` raises, streams that are open wait for its next answer."""
    life = fleet.coordinator()
    await fleet.worker("decode:0")
    troubles = iter([RuntimeError("the cluster's own words"), KeyError("endpoint")])

    async def find() -> Endpoint:
        for trouble in troubles:
            raise trouble
        return life.endpoint

    client = Client(find, timeout_s=1.0, patience_s=20.0)
    fleet.clients.append(client)
    await client.start()
    assert await stream(client, PROMPTS[0]) == plain(PROMPTS[0])


async def test_a_closed_client_says_so_at_once(fleet: Fleet) -> None:
    fleet.coordinator()
    client = await fleet.client()
    await client.close()
    with pytest.raises(Unavailable, match="closed"):
        await stream(client, PROMPTS[0])


async def test_a_closed_stream_is_cancelled(fleet: Fleet) -> None:
    life = fleet.coordinator()
    await fleet.worker("decode:0")
    client = await fleet.client()
    output = client.submit(PROMPTS[0], params(400))
    await anext(output)
    assert life.machine.snapshot()["requests"]
    await output.aclose()
    while life.machine.snapshot()["requests"]:  # noqa: ASYNC110 - the machine has no event to wait for
        await asyncio.sleep(0.005)
    families = {family.name: family for family in life.observer.metrics(life.machine.snapshot())}
    ended = families["distspec_requests_ended_total"].samples
    assert [(sample.labels["reason"], sample.value) for sample in ended] == [("abort", 1)]


async def test_a_wrong_request_is_refused_with_its_field(fleet: Fleet) -> None:
    fleet.coordinator()
    await fleet.worker("decode:0")
    client = await fleet.client()
    with pytest.raises(InvalidField) as caught:
        await stream(client, (1, 2, 50))
    assert caught.value.field == "prompt"


async def test_a_worker_that_differs_is_refused_by_name(fleet: Fleet) -> None:
    fleet.coordinator()
    await fleet.worker("decode:0")
    with pytest.raises(LinkLost, match="dtype: fleet has float32, verify:0 has bfloat16") as caught:
        await fleet.worker("verify:0", dtype="bfloat16")
    assert caught.value.refused
    with pytest.raises(LinkLost, match="distspec: fleet has 1, verify:0 has 2"):
        await fleet.worker("verify:0", distspec="2")
    await fleet.worker("verify:0")


async def test_only_the_life_that_was_started_may_join(fleet: Fleet) -> None:
    life = fleet.coordinator()
    await fleet.worker("decode:0", incarnation=5)
    for incarnation in (4, 6):
        stranger = Worker(life.endpoint, "decode:0", incarnation)
        with pytest.raises(LinkLost, match=r"not the one|is here as incarnation 5"):
            await stranger.link.open()
    assert life.lefts == []


async def test_a_request_that_breaks_the_machine_ends_alone(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    life = fleet.coordinator()
    await fleet.worker("decode:0")
    client = await fleet.client()
    honest = life.machine._submit

    def broken(name: str, message: Any) -> None:
        if message.prompt == PROMPTS[1]:
            raise ZeroDivisionError
        honest(name, message)

    monkeypatch.setattr(life.machine, "_submit", broken)
    other = asyncio.create_task(stream(client, PROMPTS[0]))
    with pytest.raises(Unavailable):
        await stream(client, PROMPTS[1])
    assert await other == plain(PROMPTS[0])


async def test_a_request_that_breaks_half_way_gets_one_terminal_message(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = fleet.coordinator()
    await fleet.worker("decode:0")
    client = await fleet.client()
    honest = life.machine._submit

    def broken(name: str, message: Any) -> None:
        honest(name, message)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(life.machine, "_submit", broken)
        outputs = [o async for o in client.submit(PROMPTS[1], params(30), SpeculationChoice())]
    assert [output.finish_reason for output in outputs] == ["abort"]
    assert life.machine.snapshot()["requests"] == {}
    assert await stream(client, PROMPTS[1]) == plain(PROMPTS[1])


async def test_a_machine_that_breaks_on_its_own_ends_its_life(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    life = fleet.coordinator()

    def broken(event: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(life.machine._events, Tick, broken)
    while not life.failures:  # noqa: ASYNC110 - the list has no event to wait for
        await asyncio.sleep(0.005)
    assert isinstance(life.failures[0], ZeroDivisionError)


async def run_journal(fleet: Fleet, path: Path, limit_bytes: int = 1 << 20) -> None:
    settings = Settings(steps=3)
    fleet.coordinator(settings=settings, journal=Journal(path, limit_bytes, settings, len(fleet.lives) + 1))
    for name in ("decode:0", "verify:0", "draft:0"):
        await fleet.worker(name)
    client = await fleet.client()
    await asyncio.gather(*(stream(client, prompt, "dsi") for prompt in PROMPTS))
    fleet.lives[-1].loop.close()


async def test_a_journal_replays_to_the_same_commands(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    await run_journal(fleet, path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    result = replay(path)
    assert result.divergence is None
    assert result.events > 50
    head, entries = read(path)
    assert head.settings == Settings(steps=3)
    frames = [head, *entries]
    changed = msgspec.structs.replace(frames[-1], digest=b"12345678")
    path.write_bytes(b"".join(msgspec.msgpack.encode(frame) for frame in [*frames[:-1], changed]))
    divergence = replay(path).divergence
    assert divergence is not None
    assert divergence.index == len(frames) - 2


async def test_a_journal_knows_how_much_was_thought_before_each_event(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That depends on who waited, and advice on it."""
    thought: list[int] = []
    monkeypatch.setattr(Machine, "has_thoughts", True)
    monkeypatch.setattr(Planner, "think", lambda _, pieces: thought.append(pieces))
    await run_journal(fleet, tmp_path / "journal", limit_bytes=1 << 24)
    before, thought[:] = sum(thought), []
    assert replay(tmp_path / "journal").divergence is None
    assert sum(thought) == before > 0


async def test_a_machine_that_decides_otherwise_is_found_out(fleet: Fleet, tmp_path: Path) -> None:
    await run_journal(fleet, tmp_path / "journal")
    head, entries = read(tmp_path / "journal")
    other = [msgspec.structs.replace(head, settings=Settings(steps=3, lookahead=1)), *entries]
    (tmp_path / "journal").write_bytes(b"".join(msgspec.msgpack.encode(frame) for frame in other))
    assert replay(tmp_path / "journal").divergence is not None


async def test_a_journal_is_bounded_and_a_cut_one_is_read_as_far_as_it_goes(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    await run_journal(fleet, path, limit_bytes=3000)
    assert path.stat().st_size <= 3000
    whole = replay(path).events
    assert whole > 1
    path.write_bytes(path.read_bytes()[:-1])
    assert replay(path).events == whole - 1
    path.write_bytes(b"\x93\x01")
    with pytest.raises(BadMessage):
        replay(path)


def test_an_older_journal_is_kept_beside(tmp_path: Path) -> None:
    for term in (1, 2):
        Journal(tmp_path / "j", 1000, Settings(), term).close()
    assert read(tmp_path / "j")[0].term == 2
    assert read(tmp_path / "j.old")[0].term == 1
