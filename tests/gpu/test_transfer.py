"""Tickets over NCCL and CUDA IPC between workers in processes of their own, on two GPUs of one host and on one."""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from distspec.transfer.aside import Aside
from distspec.transfer.base import End, Incoming, Outgoing, pieces
from distspec.transfer.collective import Collective
from distspec.transfer.links import link
from distspec.transfer.meeting import Place

HOST = "127.0.0.1"
SHAPE = (4, 2, 3000, 8, 128)
"""Layers, keys and values, positions, heads, head size: several pieces in bfloat16."""
PIECES = pieces(0, SHAPE[2], 4 * 2 * 8 * 128 * 2)
TICKETS = 3
TIMEOUT_S = 5.0
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


def content(ticket: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(ticket)
    return torch.randn(SHAPE, generator=generator).to(device, torch.bfloat16)


def transport(name: str, kind: str, device: torch.device, places: dict[str, Place], life: int = 1) -> Collective:
    make = partial(link, kind, device=device, host=HOST, timeout_s=TIMEOUT_S)
    made = Collective(name, HOST, make, lambda end: places[end.worker], timeout_s=TIMEOUT_S)
    made.reset(life)
    return made


def _source(pipe: Any, name: str, kind: str, gpu: int, life: int, tickets: int, dies: bool) -> None:
    device = torch.device("cuda", gpu)
    torch.cuda.set_device(device)
    aside = Aside(device)
    places: dict[str, Place] = {}
    mine = transport(name, kind, device, places, life)
    pipe.send(mine.place)
    places["b"] = pipe.recv()
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read(kv: Tensor, at: range) -> Tensor:
        if dies and at.stop == PIECES[-1].stop:  # several pieces are read at once
            os._exit(9)
        with aside():
            return kv[:, :, at.start : at.stop].contiguous()

    for ticket in range(tickets):
        kv = content(ticket, device)
        mine.send(Outgoing(ticket, End("b", 1), PIECES, partial(read, kv), ended.put))
        for stop in (SHAPE[2] // 2, SHAPE[2]):
            mine.advance(ticket, stop, aside.mark())
    pipe.send([ended.get(timeout=120) for _ in range(tickets)])
    pipe.recv()
    mine.shutdown()


class Destination:
    """Worker b on the first GPU. pages: of each ticket by its source."""

    def __init__(self, kind: str) -> None:
        self.device = torch.device("cuda", 0)
        self.places: dict[str, Place] = {}
        self.aside = Aside(self.device)
        self.transport = transport("b", kind, self.device, self.places)
        self.pages: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def source(self, name: str, kind: str, gpu: int, life: int = 1, dies: bool = False) -> Iterator[Any]:
        here, there = SPAWN.Pipe()
        child = SPAWN.Process(target=_source, args=(there, name, kind, gpu, life, TICKETS, dies), daemon=True)
        child.start()
        there.close()  # or a child that breaks would be waited for
        try:
            self.places[name] = here.recv()
            here.send(self.transport.place)
            yield here
            if not dies:
                here.send(None)
            child.join(60)
            assert child.exitcode == (9 if dies else 0)
        finally:
            child.kill()
            child.join()

    def expect(self, name: str, life: int = 1) -> queue.SimpleQueue[str | None]:
        ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for ticket in range(TICKETS):
            self.pages[name, ticket] = torch.zeros(SHAPE, dtype=torch.bfloat16, device=self.device)
            write = partial(self._write, self.pages[name, ticket])
            self.transport.receive(Incoming(ticket, End(name, life), PIECES, self._empty, write, ended.put))
        return ended

    def check(self, name: str) -> None:
        for ticket in range(TICKETS):
            assert torch.equal(self.pages[name, ticket], content(ticket, self.device))

    def _empty(self, at: range) -> Tensor:
        with self.aside():
            return torch.empty(*SHAPE[:2], len(at), *SHAPE[3:], dtype=torch.bfloat16, device=self.device)

    def _write(self, pages: Tensor, at: range, kv: Tensor) -> None:
        with self.aside():
            pages[:, :, at.start : at.stop] = kv


@GPUS
def test_tickets_arrive_whole(kind: str, source: int) -> None:
    b = Destination(kind)
    with b.source("a", kind, source) as a:
        ended = b.expect("a")
        assert [ended.get(timeout=120) for _ in range(TICKETS)] == [None] * TICKETS
        assert a.recv() == [None] * TICKETS
        b.check("a")
    b.transport.shutdown()


@GPUS
def test_a_source_that_dies_fails_its_tickets_and_leaves_nothing_and_its_next_life_is_linked_anew(
    kind: str, source: int
) -> None:
    b = Destination(kind)
    used = []
    for life in (1, 2):
        with b.source("a", kind, source, 2 * life - 1, dies=True):
            ended = b.expect("a", 2 * life - 1)
            said = [ended.get(timeout=120) for _ in range(TICKETS)]
            assert all(reason is not None for reason in said), said
        with b.source("a", kind, source, 2 * life) as again:
            ended = b.expect("a", 2 * life)
            assert [ended.get(timeout=120) for _ in range(TICKETS)] == [None] * TICKETS
            assert again.recv() == [None] * TICKETS
            b.check("a")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(0)
        used.append(total - free)
    assert used[1] - used[0] < 32 << 20, f"memory in use grew: {used}"
    b.transport.shutdown()
