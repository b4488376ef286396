"""Tickets over gloo: what is sent arrives, closed tickets write nothing, broken links are made anew."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distspec.transfer.base import End, Incoming, Outgoing, pieces
from distspec.transfer.collective import Collective
from distspec.transfer.group import Gloo
from distspec.transfer.meeting import Place

HOST = "127.0.0.1"
PIECES = (range(0, 3), range(3, 5))
SHAPE = (3, 2, 5, 1, 4)
"""Layers, keys and values, positions, heads, head size."""


class Fleet:
    """Some transports that know each other's boards."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.members: list[Collective] = []

    def worker(self, name: str, incarnation: int = 1, timeout_s: float = 10.0) -> Collective:
        make = partial(Gloo, host=HOST, timeout_s=timeout_s)
        made = Collective(name, HOST, make, lambda end: self.places[end.worker], timeout_s=timeout_s)
        made.reset(incarnation)
        self.places[name] = made.place
        self.members.append(made)
        return made


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    for member in made.members:
        member.shutdown()


class Copy:
    """One ticket from `kv` into `pages`, and how each side ended."""

    def __init__(self, number: int, kv: Tensor | None = None) -> None:
        self.number = number
        self.kv = torch.randn(SHAPE) if kv is None else kv
        self.pages = torch.zeros(SHAPE)
        self.sent: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.received: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def outgoing(self, peer: str, incarnation: int = 1, read: Callable[[range], Tensor] | None = None) -> Outgoing:
        default = lambda at: self.kv[:, :, at.start : at.stop]  # noqa: E731
        return Outgoing(self.number, End(peer, incarnation), PIECES, read or default, self.sent.put)

    def incoming(self, peer: str, incarnation: int = 1, write: Any = None) -> Incoming:
        def empty(at: range) -> Tensor:
            return torch.empty(*SHAPE[:2], len(at), *SHAPE[3:])

        end = End(peer, incarnation)
        return Incoming(self.number, end, PIECES, empty, write or self._write, self.received.put)

    def _write(self, at: range, kv: Tensor) -> None:
        self.pages[:, :, at.start : at.stop] = kv

    def check(self) -> None:
        assert self.sent.get(timeout=30) is None
        assert self.received.get(timeout=30) is None
        assert torch.equal(self.pages, self.kv)


def move(a: Collective, b: Collective, number: int, incarnations: tuple[int, int] = (1, 1)) -> None:
    copy = Copy(number)
    a.send(copy.outgoing("b", incarnations[1]))
    b.receive(copy.incoming("a", incarnations[0]))
    copy.check()


def test_many_tickets_both_ways_arrive_whole(fleet: Fleet) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    copies = [Copy(i) for i in range(20)]
    for i, copy in enumerate(copies):
        source, destination, names = (a, b, "ab") if i % 2 else (b, a, "ba")
        destination.receive(copy.incoming(names[0]))
        source.send(copy.outgoing(names[1]))
    for copy in copies:
        copy.check()


def test_three_workers_keep_apart(fleet: Fleet) -> None:
    workers = {name: fleet.worker(name) for name in "abc"}
    copies = []
    for i, (source, destination) in enumerate(("ab", "bc", "ca", "ac", "ba", "cb")):
        copies.append(Copy(i))
        workers[source].send(copies[-1].outgoing(destination))
        workers[destination].receive(copies[-1].incoming(source))
    for copy in copies:
        copy.check()


def test_a_ticket_closed_before_it_began_ends_both_sides_and_spares_the_next(fleet: Fleet) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    copy = Copy(1)
    b.receive(copy.incoming("a"))
    assert b.close(1)
    a.send(copy.outgoing("b"))
    assert "no use" in (copy.sent.get(timeout=30) or "")
    assert copy.received.empty()
    assert not copy.pages.any()
    move(a, b, 2)


def test_a_source_that_gives_up_tells_the_destination(fleet: Fleet) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    gate = threading.Event()
    first, second = Copy(1), Copy(2)

    def slow(at: range) -> Tensor:
        gate.wait(30)
        return first.kv[:, :, at.start : at.stop]

    a.send(first.outgoing("b", read=slow))
    a.send(second.outgoing("b"))
    assert a.close(2)
    gate.set()
    b.receive(first.incoming("a"))
    b.receive(second.incoming("a"))
    first.check()
    assert "gave it up" in (second.received.get(timeout=30) or "")
    move(a, b, 3)
    assert second.sent.empty()


def test_nothing_is_written_once_close_has_returned(fleet: Fleet) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    copy, begun, gate = Copy(1), threading.Event(), threading.Event()
    calls: list[range] = []

    def read(at: range) -> Tensor:
        if at.start:
            begun.set()
            gate.wait(30)
        return copy.kv[:, :, at.start : at.stop]

    a.send(copy.outgoing("b", read=read))
    b.receive(copy.incoming("a", write=lambda at, kv: calls.append(at)))
    assert begun.wait(30)
    assert b.close(1)
    before = list(calls)
    gate.set()
    copy.sent.get(timeout=30)
    move(a, b, 2)  # goes through the same lane, so the closed ticket is over when it arrives
    assert calls == before
    assert copy.received.empty()


def test_a_failed_link_is_made_anew(fleet: Fleet) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    move(a, b, 1)
    broken = Copy(2)

    def fail(at: range) -> Tensor:
        raise OSError("device lost")

    a.send(broken.outgoing("b", read=fail))
    b.receive(broken.incoming("a"))
    assert "device lost" in (broken.sent.get(timeout=30) or "")
    assert broken.received.get(timeout=30) is not None
    move(a, b, 3)


def test_a_link_that_failed_on_the_receiving_side_is_made_anew(fleet: Fleet) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    move(a, b, 1)
    broken = Copy(2)

    def fail(at: range, kv: Tensor) -> None:
        raise OSError("no such page")

    a.send(broken.outgoing("b"))
    b.receive(broken.incoming("a", write=fail))
    assert "no such page" in (broken.received.get(timeout=30) or "")
    broken.sent.get(timeout=30)
    move(a, b, 3)
    move(a, b, 4)


def test_a_new_life_has_new_links_and_forgets_old_tickets(fleet: Fleet) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    move(a, b, 1)
    old = Copy(2)
    b.receive(old.incoming("a"))
    b.reset(2)
    move(a, b, 2, incarnations=(1, 2))
    assert old.received.empty()
    assert not old.pages.any()


def _lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("transfer _")}


def test_lives_of_a_peer_that_are_over_leave_no_thread_and_no_key(fleet: Fleet) -> None:
    others = _lanes()
    a, b = fleet.worker("a"), fleet.worker("b")
    for life in range(1, 5):
        b.reset(life)
        move(a, b, life, incarnations=(1, life))
    unread = Copy(5)
    a.send(unread.outgoing("b", 4))
    a.close(5)
    b.reset(5)
    move(a, b, 6, incarnations=(1, 5))
    while len(_lanes() - others) > 2:
        threading.Event().wait(0.02)
    keys = a.open_board(None)._values  # type: ignore[attr-defined]
    assert all(key.startswith("a.1>b.5/") for key in keys)


def test_an_absent_source_fails_the_ticket_after_the_timeout(fleet: Fleet) -> None:
    fleet.worker("a")
    b = fleet.worker("b", timeout_s=1.0)
    copy = Copy(1)
    b.receive(copy.incoming("a"))
    assert "did not come" in (copy.received.get(timeout=30) or "")


def _dying_source(place: Place, pipe: Any) -> None:
    fleet = Fleet()
    a = fleet.worker("a")
    pipe.send(a.place)
    fleet.places["b"] = place
    copy = Copy(1)

    def read(at: range) -> Tensor:
        if at.start:
            os._exit(9)
        return copy.kv[:, :, at.start : at.stop]

    a.send(copy.outgoing("b", read=read))
    threading.Event().wait()


def test_a_source_that_dies_midway_fails_its_ticket_and_no_other(fleet: Fleet) -> None:
    b, c = fleet.worker("b"), fleet.worker("c")
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_dying_source, args=(b.place, there))
    child.start()
    fleet.places["a"] = here.recv()
    doomed, other = Copy(1), Copy(2)
    b.receive(doomed.incoming("a"))
    b.receive(other.incoming("c"))
    c.send(other.outgoing("b"))
    assert doomed.received.get(timeout=60) is not None
    other.check()
    child.join()


@given(st.integers(0, 99), st.integers(1, 5000), st.integers(0, 1 << 24))
def test_pieces_cover_every_position_once_in_order(start: int, length: int, position_bytes: int) -> None:
    found = pieces(start, length, position_bytes)
    assert [position for piece in found for position in piece] == list(range(start, start + length))
    assert all(len(piece) * position_bytes <= 8 << 20 for piece in found if len(piece) > 1)
