"""Tickets over NCCL between two GPUs of one host, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import queue
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from distspec.transfer.aside import Aside
from distspec.transfer.base import End, Incoming, Outgoing, pieces
from distspec.transfer.collective import Collective
from distspec.transfer.group import Nccl
from distspec.transfer.meeting import Place

pytestmark = pytest.mark.needs("gpu2")
HOST = "127.0.0.1"
SHAPE = (4, 2, 3000, 8, 128)
"""Layers, keys and values, positions, heads, head size: several pieces in bfloat16."""
PIECES = pieces(0, SHAPE[2], 4 * 2 * 8 * 128 * 2)
TICKETS = 3


def content(ticket: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(ticket)
    return torch.randn(SHAPE, generator=generator).to(device, torch.bfloat16)


def transport(name: str, device: torch.device, places: dict[str, Place]) -> Collective:
    make = partial(Nccl, device=device, timeout_s=60.0)
    made = Collective(name, HOST, make, lambda end: places[end.worker], timeout_s=60.0)
    made.reset(1)
    return made


def _source(pipe: Any) -> None:
    device = torch.device("cuda:0")
    aside = Aside(device)
    places: dict[str, Place] = {}
    a = transport("a", device, places)
    pipe.send(a.place)
    places["b"] = pipe.recv()
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for ticket in range(TICKETS):
        kv = content(ticket, device)
        read = lambda at, kv=kv: kv[:, :, at.start : at.stop].contiguous()  # noqa: E731
        a.send(Outgoing(ticket, End("b", 1), PIECES, read, ended.put))
        a.advance(ticket, SHAPE[2], aside.mark())
    pipe.send([ended.get(timeout=120) for _ in range(TICKETS)])
    pipe.recv()
    a.shutdown()


def test_tickets_arrive_whole_between_two_gpus() -> None:
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_source, args=(there,))
    child.start()
    device = torch.device("cuda:1")
    places = {"a": here.recv()}
    b = transport("b", device, places)
    here.send(b.place)
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    pages = {ticket: torch.zeros(SHAPE, dtype=torch.bfloat16, device=device) for ticket in range(TICKETS)}

    def empty(at: range) -> Tensor:
        return torch.empty(*SHAPE[:2], len(at), *SHAPE[3:], dtype=torch.bfloat16, device=device)

    def write(ticket: int, at: range, kv: Tensor) -> None:
        pages[ticket][:, :, at.start : at.stop] = kv

    for ticket in range(TICKETS):
        b.receive(Incoming(ticket, End("a", 1), PIECES, empty, partial(write, ticket), ended.put))
    assert [ended.get(timeout=120) for _ in range(TICKETS)] == [None] * TICKETS
    assert here.recv() == [None] * TICKETS
    for ticket in range(TICKETS):
        assert torch.equal(pages[ticket], content(ticket, device))
    here.send(None)
    child.join(60)
    b.shutdown()
    assert child.exitcode == 0
