"""Tickets over NCCL and CUDA IPC between the pools of workers in processes of their own, on two GPUs of one host and on
one."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
import pytest
import torch
from torch import Tensor

from distspec.kv.pool import KVPool, Layout
from distspec.kv.sequence import Spots
from distspec.transfer.aside import Aside
from distspec.transfer.base import End, Incoming, Lies, Outgoing, pieces
from distspec.transfer.collective import Collective
from distspec.transfer.ipc import CudaMemory
from distspec.transfer.links import link
from distspec.transfer.meeting import Place
from distspec.transfer.window import Window

HOST = "127.0.0.1"
SHAPE = (4, 2, 3000, 8, 128)
"""Layers, keys and values, positions, heads, head size: several pieces in bfloat16."""
FEATURES = 512
PIECES = pieces(0, SHAPE[2], (4 * 2 * 8 * 128 + FEATURES) * 2)
TICKETS = 3
TIMEOUT_S = 5.0
WAIT_S = 45.0
"""For a process's first words, or how a ticket ended: a first link of NCCL takes seconds, one that broke TIMEOUT_S and
what its end may take."""
TEST_S = 120.0
"""For a whole test, which starts up to four processes."""
Taken = TypeVar("Taken")
SPAWN = multiprocessing.get_context("spawn")
GPUS = pytest.mark.parametrize(
    ("kind", "source"),
    [
        pytest.param("nccl", 1, marks=pytest.mark.needs("gpu2")),
        pytest.param("ipc", 1, marks=pytest.mark.needs("gpu2")),
        pytest.param("auto", 1, marks=pytest.mark.needs("gpu2")),
        pytest.param("ipc", 0, marks=pytest.mark.needs("gpu")),
        pytest.param("auto", 0, marks=pytest.mark.needs("gpu")),
    ],
)
"""Kind of link, and the source's GPU; the destination is on the first."""


@pytest.fixture(autouse=True)
def _bounded(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """A test that hangs, maybe in the driver, where no Python is heard, says where, and ends its process."""
    with capfd.disabled():
        told = os.dup(2)
    faulthandler.dump_traceback_later(TEST_S, exit=True, file=told)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.close(told)


def content(ticket: int, device: torch.device) -> Tensor:
    """Of a ticket, as `KVPool.gather` has it."""
    generator = torch.Generator().manual_seed(ticket)
    layers, planes, positions, kv_heads, head_dim = SHAPE
    width = layers * planes * kv_heads * head_dim + FEATURES
    return torch.randn(positions * width, generator=generator).to(device, torch.bfloat16)


class Pages:
    """A ticket's in a pool of this process, and how they cross."""

    def __init__(self, page_size: int, device: torch.device, aside: Aside) -> None:
        layers, _, positions, kv_heads, head_dim = SHAPE
        used = -(-positions // page_size)
        pages = torch.randperm(used + 7)[:used]
        places = (used + 7) * page_size
        self.pool = KVPool(layers, places, kv_heads, head_dim, features=FEATURES, dtype=torch.bfloat16, device=device)
        self.spots = Spots(pages.tolist(), 0, page_size)
        self.places = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:positions].to(device)
        self._aside = aside
        mine = [tensor.data_ptr() for tensor in self.pool.memory]
        self.pool.pull(self.spots, mine, self.pool.layout, self.spots, 1)  # compiled here, not while a peer waits
        torch.cuda.synchronize()

    def read(self, at: range) -> Tensor:
        with self._aside():
            return self.pool.gather(self.places[at.start : at.stop])

    def lies(self, at: range) -> Lies:
        note = (at.start, self.spots.behind(at.start), self.pool.layout)
        return Lies(self.pool.memory, msgspec.msgpack.encode(note))

    def empty(self, at: range) -> Tensor:
        with self._aside():
            return torch.empty(len(at) * self.pool.width, dtype=torch.bfloat16, device=self.pool.data.device)

    def write(self, at: range, kv: Tensor) -> None:
        with self._aside():
            self.pool.scatter(self.places[at.start : at.stop], kv)

    def pull(self, at: range, addresses: Sequence[int], note: bytes) -> None:
        start, theirs, layout = msgspec.msgpack.decode(note, type=tuple[int, Spots, Layout])
        assert layout.fits(self.pool.layout)
        self.pool.pull(self.spots.behind(at.start), addresses, layout, theirs.behind(at.start - start), len(at))


def transport(name: str, kind: str, device: torch.device, places: dict[str, Place], life: int = 1) -> Collective:
    make = partial(link, kind, device=device, host=HOST, timeout_s=TIMEOUT_S)
    made = Collective(name, HOST, make, lambda end: places[end.worker], timeout_s=TIMEOUT_S)
    made.reset(life)
    return made


def _said(pipe: Any) -> Any:
    assert pipe.poll(WAIT_S), "the source says nothing"
    return pipe.recv()


def _source(pipe: Any, name: str, kind: str, gpu: int, life: int, tickets: int, dies: bool) -> None:
    faulthandler.dump_traceback_later(WAIT_S - 5.0)  # what it did, before the test gives it up
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    aside = Aside(device)
    places: dict[str, Place] = {}
    mine = transport(name, kind, device, places, life)
    pipe.send(mine.place)
    places["b"] = pipe.recv()
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def unless_last(take: Callable[[range], Taken], at: range) -> Taken:
        if dies and at.stop == PIECES[-1].stop:  # several pieces cross at once
            os._exit(9)
        return take(at)

    for ticket in range(tickets):
        pages = Pages(16, device, aside)
        pages.pool.scatter(pages.places, content(ticket, device))
        read, lies = partial(unless_last, pages.read), partial(unless_last, pages.lies)
        mine.send(Outgoing(ticket, End("b", 1), PIECES, read, ended.put, None if name == "staged" else lies))
        for stop in (SHAPE[2] // 2, SHAPE[2]):
            mine.advance(ticket, stop, aside.mark())
    pipe.send([ended.get(timeout=WAIT_S) for _ in range(tickets)])
    pipe.recv()
    mine.shutdown()


class Destination:
    """Worker b on the first GPU. pages: of each ticket by its source."""

    def __init__(self, kind: str) -> None:
        self.device = torch.device("cuda", 0)
        self.places: dict[str, Place] = {}
        self.aside = Aside(self.device)
        self.transport = transport("b", kind, self.device, self.places)
        self.pages: dict[tuple[str, int], Pages] = {}
        self.ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    @contextmanager
    def source(self, name: str, kind: str, gpu: int, life: int = 1, dies: bool = False) -> Iterator[Any]:
        here, there = SPAWN.Pipe()
        child = SPAWN.Process(target=_source, args=(there, name, kind, gpu, life, TICKETS, dies), daemon=True)
        child.start()
        there.close()  # or a child that breaks would be waited for
        try:
            self.places[name] = _said(here)
            here.send(self.transport.place)
            yield here
            if not dies:
                here.send(None)
            child.join(WAIT_S)
            assert child.exitcode == (9 if dies else 0)
        finally:
            child.kill()
            child.join()

    def expect(self, name: str, life: int = 1) -> queue.SimpleQueue[str | None]:
        ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for ticket in range(TICKETS):
            pages = self.pages[name, ticket] = Pages(48, self.device, self.aside)
            end = End(name, life)
            self.transport.receive(Incoming(ticket, end, PIECES, pages.empty, pages.write, ended.put, pages.pull))
        return ended

    def check(self, name: str) -> None:
        for ticket in range(TICKETS):
            pages = self.pages[name, ticket]
            torch.cuda.synchronize()
            assert torch.equal(pages.pool.gather(pages.places), content(ticket, self.device))


@GPUS
@pytest.mark.parametrize("name", ["shown", "staged"])
def test_tickets_arrive_whole(kind: str, source: int, name: str) -> None:
    """Those that say where they lie, and those that lie nowhere that stays."""
    b = Destination(kind)
    with b.source(name, kind, source) as a:
        ended = b.expect(name)
        assert [ended.get(timeout=WAIT_S) for _ in range(TICKETS)] == [None] * TICKETS
        assert _said(a) == [None] * TICKETS
        b.check(name)
    b.transport.shutdown()


@GPUS
def test_a_source_that_dies_fails_its_tickets_and_leaves_nothing_and_its_next_life_is_linked_anew(
    kind: str, source: int
) -> None:
    b = Destination(kind)
    used: list[int] = []
    for life in (1, 2):
        with b.source("a", kind, source, 2 * life - 1, dies=True):
            ended = b.expect("a", 2 * life - 1)
            said = [ended.get(timeout=WAIT_S) for _ in range(TICKETS)]
            assert all(reason is not None for reason in said), said
        with b.source("a", kind, source, 2 * life) as again:
            ended = b.expect("a", 2 * life)
            assert [ended.get(timeout=WAIT_S) for _ in range(TICKETS)] == [None] * TICKETS
            assert _said(again) == [None] * TICKETS
            b.check("a")
        b.pages.clear()
        used.append(_settled(used[0] + (32 << 20) if used else 0))
    assert used[1] - used[0] < 32 << 20, f"memory in use grew: {used}"
    b.transport.shutdown()


def _computing(pipe: Any, cycles: int, dies: bool) -> None:
    """Worker a on the second GPU, three tickets: of the second it is said that it is offered, which is so many cycles
    before it is computed, and when it is; of each how it ended."""
    faulthandler.dump_traceback_later(WAIT_S - 5.0)
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    aside, places = Aside(device), dict[str, Place]()
    mine = transport("a", "ipc", device, places)
    pipe.send(mine.place)
    places["b"] = pipe.recv()
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for ticket in range(TICKETS):
        pages, found = Pages(16, device, aside), content(ticket, device)
        torch.cuda.synchronize()
        if ticket == 1:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        pages.pool.scatter(pages.places, found)
        computed = aside.mark()
        mine.send(Outgoing(ticket, End("b", 1), PIECES, pages.read, ended.put, pages.lies))
        mine.advance(ticket, SHAPE[2], computed)
        if ticket == 1:
            pipe.send("offered")
            if dies:
                time.sleep(0.3)
                os._exit(9)
            computed()
            pipe.send("computed")
        pipe.send(ended.get(timeout=WAIT_S))
    pipe.recv()
    mine.shutdown()


@contextmanager
def _met(cycles: int, dies: bool = False) -> Iterator[tuple[Destination, Any]]:
    """The first ticket has arrived, the second is waited for."""
    b = Destination("ipc")
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=_computing, args=(there, cycles, dies), daemon=True)
    child.start()
    there.close()
    try:
        b.places["a"] = _said(here)
        b.ended = b.expect("a")
        here.send(b.transport.place)
        assert _said(here) is None
        assert b.ended.get(timeout=WAIT_S) is None
        assert _said(here) == "offered"
        lanes = list(b.transport._life.lanes.values())
        deadline_s = time.monotonic() + WAIT_S
        while not any(getattr(lane, "_under_way", ()) for lane in lanes):
            assert time.monotonic() < deadline_s
        yield b, here
        if not dies:
            here.send(None)
        child.join(WAIT_S)
        assert child.exitcode == (9 if dies else 0)
    finally:
        child.kill()
        child.join()
        b.transport.shutdown()


@pytest.mark.needs("gpu2")
@pytest.mark.parametrize("cycles", [500_000_000, 6_000_000_000])
def test_what_is_shown_before_it_is_computed_arrives_as_it_was_computed(cycles: int) -> None:
    """However long that takes: who reads it waits a moment, and is told again."""
    with _met(cycles) as (b, a):
        assert _said(a) == "computed"
        assert [_said(a), _said(a)] == [None] * 2
        assert [b.ended.get(timeout=WAIT_S) for _ in range(2)] == [None] * 2
        b.check("a")


@pytest.mark.needs("gpu2")
def test_a_ticket_is_closed_at_once_though_its_source_computes() -> None:
    with _met(6_000_000_000) as (b, a):
        pages = b.pages["a", 1]
        assert b.transport.close(1)
        assert not a.poll(), "it waited for the source"
        before = pages.pool.data.clone()
        assert _said(a) == "computed"
        assert "no use" in _said(a)
        assert _said(a) is None
        assert b.ended.get(timeout=WAIT_S) is None
        torch.cuda.synchronize()
        assert torch.equal(pages.pool.data, before)


@pytest.mark.needs("gpu2")
def test_a_source_that_dies_while_it_computes_what_is_waited_for_fails_its_tickets() -> None:
    with _met(6_000_000_000, dies=True) as (b, _):
        assert all(b.ended.get(timeout=WAIT_S) is not None for _ in range(2))


class Kept(CudaMemory):
    """made: what it was asked for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.made: list[Tensor] = []

    def empty(self, size_bytes: int) -> Tensor:
        self.made.append(super().empty(size_bytes))
        return self.made[-1]


class Told:
    """A store in which the other side has come and sees everything."""

    def set(self, key: str, value: bytes) -> None:
        pass

    def get(self, key: str) -> bytes:
        return msgspec.msgpack.encode(("", ""))


@pytest.mark.needs("gpu")
def test_a_stage_is_no_memory_that_others_kernels_still_write() -> None:
    device = torch.device("cuda", 0)
    memory = Kept(device)
    window = Window(Told(), 0, lambda: memory)
    staged = torch.arange(1 << 20, device=device)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    theirs = torch.empty(32 << 20, dtype=torch.uint8, device=device)
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    theirs.fill_(7)
    del theirs  # whoever takes it next, on this stream, writes after that
    window.stage(staged, 0)
    torch.cuda.synchronize()
    assert torch.equal(memory.made[-1][: staged.nbytes].view(staged.dtype), staged)
    window.abort()


def _settled(most: int) -> int:
    """Bytes in use on the first GPU, once they are at most so many; or after a while, in which who has a dead process's
    memory open hears of that."""
    deadline_s = time.monotonic() + 3.0
    while True:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(0)
        if total - free <= most or time.monotonic() > deadline_s:
            return total - free
        time.sleep(0.05)
