"""Tickets over gloo and through windows: what is sent arrives, closed tickets write nothing, broken links are made
anew."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from distspec.transfer import collective
from distspec.transfer.base import End, Incoming, Lies, Outgoing
from distspec.transfer.collective import Collective
from distspec.transfer.destination import Destination
from distspec.transfer.group import Gloo
from distspec.transfer.lane import Lane
from distspec.transfer.meeting import Place
from distspec.transfer.window import Window
from tests.hostmemory import HostMemory, at

HOST = "127.0.0.1"
PIECES = (range(0, 3), range(3, 5))
SHAPE = (3, 2, 5, 1, 4)
"""Layers, keys and values, positions, heads, head size."""


MEMORY = HostMemory()


class Fleet:
    """Some transports that know each other's boards. kind: of their links."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.places: dict[str, Place] = {}
        self.members: list[Collective] = []

    def worker(self, name: str, incarnation: int = 1, timeout_s: float = 10.0) -> Collective:
        makers: dict[str, Any] = {
            "gloo": partial(Gloo, host=HOST, timeout_s=timeout_s),
            "window": partial(Window, make_memory=lambda: MEMORY),
        }
        made = Collective(name, HOST, makers[self.kind], lambda end: self.places[end.worker], timeout_s=timeout_s)
        made.reset(incarnation)
        self.places[name] = made.place
        self.members.append(made)
        return made


@pytest.fixture(params=["gloo", "window"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    made = Fleet(request.param)
    yield made
    for member in made.members:
        member.shutdown()


class Copy:
    """One ticket from `kv` into `pages`, and how each side ended."""

    def __init__(self, number: int, kv: Tensor | None = None) -> None:
        self.number = number
        self.kv = MEMORY.like(torch.randn(SHAPE) if kv is None else kv)
        self.pages = torch.zeros(SHAPE)
        self.sent: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.received: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def leave(
        self,
        source: Collective,
        peer: str,
        incarnation: int = 1,
        read: Callable[[range], Tensor] | None = None,
        computed: int = PIECES[-1].stop,
    ) -> None:
        """Send it, `computed` positions of it at first."""
        default = lambda at: self.kv[:, :, at.start : at.stop]  # noqa: E731
        lies = None if read else lambda _: Lies((self.kv,), b"whole")
        source.send(Outgoing(self.number, End(peer, incarnation), PIECES, read or default, self.sent.put, lies))
        source.advance(self.number, computed, lambda: None)

    def incoming(self, peer: str, incarnation: int = 1, write: Any = None) -> Incoming:
        def empty(at: range) -> Tensor:
            return torch.empty(*SHAPE[:2], len(at), *SHAPE[3:])

        def pull(positions: range, addresses: Sequence[int], note: bytes) -> None:
            assert note == b"whole"
            whole = at(addresses[0], self.kv.nbytes).view(torch.float32).view(SHAPE)
            for piece in PIECES:
                if positions.start <= piece.start < positions.stop:
                    (write or self._write)(piece, whole[:, :, piece.start : piece.stop])

        end = End(peer, incarnation)
        return Incoming(self.number, end, PIECES, empty, write or self._write, self.received.put, pull)

    def _write(self, at: range, kv: Tensor) -> None:
        self.pages[:, :, at.start : at.stop] = kv

    def check(self) -> None:
        assert self.sent.get(timeout=30) is None
        assert self.received.get(timeout=30) is None
        assert torch.equal(self.pages, self.kv)


def move(a: Collective, b: Collective, number: int, incarnations: tuple[int, int] = (1, 1)) -> None:
    copy = Copy(number)
    copy.leave(a, "b", incarnations[1])
    b.receive(copy.incoming("a", incarnations[0]))
    copy.check()


def test_many_tickets_both_ways_arrive_whole(fleet: Fleet) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    copies = [Copy(i) for i in range(20)]
    for i, copy in enumerate(copies):
        source, destination, names = (a, b, "ab") if i % 2 else (b, a, "ba")
        destination.receive(copy.incoming(names[0]))
        copy.leave(source, names[1])
    for copy in copies:
        copy.check()


def test_three_workers_keep_apart(fleet: Fleet) -> None:
    workers = {name: fleet.worker(name) for name in "abc"}
    copies = []
    for i, (source, destination) in enumerate(permutations("abc", 2)):
        copies.append(Copy(i))
        copies[-1].leave(workers[source], destination)
        workers[destination].receive(copies[-1].incoming(source))
    for copy in copies:
        copy.check()


def test_a_ticket_closed_before_it_began_ends_both_sides_and_spares_the_next(fleet: Fleet) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    copy = Copy(1)
    b.receive(copy.incoming("a"))
    assert b.close(1)
    copy.leave(a, "b")
    assert "no use" in (copy.sent.get(timeout=30) or "")
    assert copy.received.empty()
    assert not copy.pages.any()
    move(a, b, 2)


def test_a_ticket_that_is_refused_ends_at_its_source_and_spares_the_link(fleet: Fleet) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    move(a, b, 1)
    made = {key for key in _keys(a) if "/link" in key}
    for number in range(2, 12):
        copy = Copy(number)
        copy.leave(a, "b")  # offered while nobody has heard of it here
        b.refuse(number, End("a", 1))
        assert "no use" in (copy.sent.get(timeout=30) or "")
    move(a, b, 12)
    assert {key for key in _keys(a) if "/link" in key} == made
    assert not _waits(b)


def test_a_source_that_gives_up_tells_the_destination(fleet: Fleet) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    gate = threading.Event()
    first, second = Copy(1), Copy(2)

    def slow(at: range) -> Tensor:
        gate.wait(30)
        return first.kv[:, :, at.start : at.stop]

    first.leave(a, "b", read=slow)
    second.leave(a, "b")
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

    copy.leave(a, "b", read=read)
    b.receive(copy.incoming("a", write=lambda at, kv: calls.append(at)))
    assert begun.wait(30)
    assert b.close(1)
    before = list(calls)
    gate.set()
    copy.sent.get(timeout=30)
    move(a, b, 2)  # goes through the same lane, so the closed ticket is over when it arrives
    assert calls == before
    assert copy.received.empty()
    assert not _waits(b)


def test_a_failed_link_is_made_anew(fleet: Fleet) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    move(a, b, 1)
    broken = Copy(2)

    def fail(at: range) -> Tensor:
        raise OSError("device lost")

    broken.leave(a, "b", read=fail)
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

    broken.leave(a, "b")
    b.receive(broken.incoming("a", write=fail))
    assert "no such page" in (broken.received.get(timeout=30) or "")
    broken.sent.get(timeout=30)
    move(a, b, 3)
    move(a, b, 4)


def test_a_lane_outlives_a_link_that_cannot_be_ended(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    move(a, b, 1)

    def fails(_: object) -> Tensor:
        raise OSError("device lost")

    broken = Copy(2)
    with monkeypatch.context() as patched:
        patched.setattr(Gloo, "abort", fails)
        patched.setattr(Window, "abort", fails)
        broken.leave(a, "b", read=fails)
        b.receive(broken.incoming("a"))
        assert broken.sent.get(timeout=30) is not None
        assert broken.received.get(timeout=30) is not None
    move(a, b, 3)


def test_who_shuts_down_waits_for_links_that_are_being_let_go(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    move(a, b, 1)
    lanes = list(a._life.lanes.values())

    def slow(_: object) -> None:
        threading.Event().wait(0.5)

    with monkeypatch.context() as patched:
        patched.setattr(collective, "_JOIN_S", 0.1)
        patched.setattr(Gloo, "abort", slow)
        patched.setattr(Window, "abort", slow)
        a.shutdown()
    fleet.members.remove(a)
    assert not any(lane.is_alive() for lane in lanes)


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
    return {thread for thread in threading.enumerate() if isinstance(thread, Lane)}


def _waits(worker: Collective) -> bool:
    """Whether its lanes still expect to hear something of tickets."""
    return any(lane._waits for lane in worker._life.lanes.values() if isinstance(lane, Destination))


def _keys(worker: Collective) -> set[str]:
    """What lies on its board."""
    return set(worker._ways.board._values)


def test_lives_of_a_peer_that_are_over_leave_no_thread_and_no_key(fleet: Fleet) -> None:
    others = _lanes()
    a, b = fleet.worker("a"), fleet.worker("b")
    for life in range(1, 5):
        b.reset(life)
        move(a, b, life, incarnations=(1, life))
    unread = Copy(5)
    unread.leave(a, "b", 4)
    a.close(5)
    b.reset(5)
    move(a, b, 6, incarnations=(1, 5))
    while len(_lanes() - others) > 2:
        threading.Event().wait(0.02)
    assert all(key.startswith("a.1>b.5/") for key in _keys(a))


def test_a_source_that_is_gone_fails_the_ticket(fleet: Fleet) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    copy = Copy(1)
    a.shutdown()
    fleet.members.remove(a)
    b.receive(copy.incoming("a"))
    assert "TransferFailed" in (copy.received.get(timeout=30) or "")


def test_a_destination_that_does_not_come_fails_the_ticket_after_the_timeout(fleet: Fleet) -> None:
    a, b = fleet.worker("a", timeout_s=2.0), fleet.worker("b")
    copy = Copy(1)
    copy.leave(a, "b")
    assert "did not come" in (copy.sent.get(timeout=30) or "")
    b.receive(copy.incoming("a"))
    assert copy.received.get(timeout=30) is not None
    move(a, b, 2)
    assert not _waits(b)


def test_positions_cross_as_they_are_computed_and_tickets_overtake_each_other(fleet: Fleet) -> None:
    """A ticket that waits for its positions holds up no other, and gets them piece by piece."""
    a, b = fleet.worker("a"), fleet.worker("b")
    copies, written = [Copy(number) for number in range(3)], queue.SimpleQueue[tuple[int, range]]()

    def write(copy: Copy, at: range, kv: Tensor) -> None:
        copy._write(at, kv)
        written.put((copy.number, at))

    for copy in copies:
        b.receive(copy.incoming("a", write=partial(write, copy)))
    for copy in copies:
        copy.leave(a, "b", computed=0)
    for number, computed in ((1, 3), (0, 4), (2, 5), (1, 5), (0, 5)):
        a.advance(number, computed, lambda: None)
    for copy in copies:
        copy.check()
    order = [written.get() for _ in range(6)]
    assert order == [(1, PIECES[0]), (0, PIECES[0]), (2, PIECES[0]), (2, PIECES[1]), (1, PIECES[1]), (0, PIECES[1])]


def test_nothing_is_read_before_it_is_computed(fleet: Fleet) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    copy, gate = Copy(1), threading.Event()

    def read(at: range) -> Tensor:
        assert gate.is_set()
        return copy.kv[:, :, at.start : at.stop]

    b.receive(copy.incoming("a"))
    copy.leave(a, "b", read=read, computed=0)
    a.advance(1, 5, lambda: None if gate.wait(30) else pytest.fail("nobody computed"))
    threading.Event().wait(0.3)
    gate.set()
    copy.check()


@pytest.mark.parametrize("closes", ["source", "destination"])
def test_a_ticket_closed_while_it_waits_for_positions_spares_its_link(fleet: Fleet, closes: str) -> None:
    a, b = fleet.worker("a"), fleet.worker("b")
    copy, reached = Copy(1), threading.Event()

    def write(at: range, kv: Tensor) -> None:
        copy._write(at, kv)
        reached.set()

    b.receive(copy.incoming("a", write=write))
    copy.leave(a, "b", computed=3)
    assert reached.wait(30)
    if closes == "source":
        assert a.close(1)
        assert "gave it up" in (copy.received.get(timeout=30) or "")
    else:
        assert b.close(1)
        a.advance(1, 5, lambda: None)
        assert "no use" in (copy.sent.get(timeout=30) or "")
    assert not copy.pages[:, :, 3:].any()
    made = {key for key in _keys(a) if "/link" in key}
    move(a, b, 2)
    assert {key for key in _keys(a) if "/link" in key} == made


def _dying_source(kind: str, place: Place, pipe: Any) -> None:
    fleet = Fleet(kind)
    a = fleet.worker("a")
    pipe.send(a.place)
    fleet.places["b"] = place
    copy = Copy(1)

    def read(at: range) -> Tensor:
        if at.start:
            os._exit(9)
        return copy.kv[:, :, at.start : at.stop]

    copy.leave(a, "b", read=read)
    threading.Event().wait()


def test_a_source_that_dies_midway_fails_its_ticket_and_no_other(fleet: Fleet) -> None:
    b, c = fleet.worker("b"), fleet.worker("c")
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_dying_source, args=(fleet.kind, b.place, there))
    child.start()
    fleet.places["a"] = here.recv()
    doomed, other = Copy(1), Copy(2)
    b.receive(doomed.incoming("a"))
    b.receive(other.incoming("c"))
    other.leave(c, "b")
    assert doomed.received.get(timeout=60) is not None
    other.check()
    child.join()
