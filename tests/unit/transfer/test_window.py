"""A window: who sees whose memory, and that what was read where it lies counts only while it was the ticket's."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from distspec.transfer.aside import Mark
from distspec.transfer.base import End, Incoming, Lies, Outgoing
from distspec.transfer.collective import Collective
from distspec.transfer.group import Rendezvous
from distspec.transfer.meeting import Place, Served
from distspec.transfer.window import SEATS, Memory, NoSharedMemory, Reading, Region, Shown, Window
from tests.hostmemory import HostMemory, at

HOST = "127.0.0.1"
POSITIONS = 40
PIECES = tuple(range(first, first + 4) for first in range(0, POSITIONS, 4))
GARBAGE = -1


@pytest.fixture
def board() -> Iterator[Served]:
    made = Served(HOST)
    yield made
    made.close()


def meet(board: Served, memories: Sequence[Callable[[], Memory]]) -> list[Window | NoSharedMemory]:
    """What each side gets."""

    def make(rank: int) -> Window | NoSharedMemory:
        try:
            return Window(Rendezvous(board, "a>b", 30.0), rank, memories[rank])
        except NoSharedMemory as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(make, range(2)))


class Elsewhere(HostMemory):
    """Of another host, where the same handles open other memory."""

    def open(self, handle: bytes) -> int:
        self._other = self.empty(4096)
        return self._other.data_ptr()

    def close(self, address: int) -> None:
        pass


class Nothing(HostMemory):
    def share(self, tensor: Tensor) -> Region:
        raise NoSharedMemory("no such thing")


def missing() -> HostMemory:
    raise NoSharedMemory("no library")


def stands(window: Window, shown: Shown) -> bool:
    return read(window, shown).stands()


def read(window: Window, shown: Shown) -> Reading:
    """Nothing but the word."""
    reading = window.read(shown)
    reading.launch(lambda: None)
    return reading


@pytest.mark.parametrize(
    ("memories", "reason"),
    [
        ((HostMemory, Elsewhere), "another host"),
        ((Nothing, HostMemory), "no such thing"),
        ((missing, HostMemory), "no library"),
        ((HostMemory, missing), "no library"),
    ],
)
def test_where_one_does_not_see_the_others_memory_both_are_told(
    board: Served, memories: tuple[Callable[[], Memory], ...], reason: str
) -> None:
    source, destination = meet(board, memories)
    assert isinstance(source, NoSharedMemory)
    assert isinstance(destination, NoSharedMemory)
    assert reason in f"{source} {destination}"


def test_what_is_shown_is_read_and_what_lies_nowhere_goes_by_a_stage(board: Served) -> None:
    memory = HostMemory()
    source, destination = meet(board, [lambda: memory, HostMemory])
    assert isinstance(source, Window)
    assert isinstance(destination, Window)
    lies = memory.like(torch.randn(3, 5))
    shown = source.show(Lies((lies,), b"three rows"), 0)
    assert shown.note == b"three rows"
    [address] = destination.addresses(shown)
    assert torch.equal(at(address, lies.nbytes).view(torch.float32), lies.flatten())
    for size in (7, 9 << 20, 3):
        content, found = torch.randn(size), torch.empty(size)
        assert destination.fetch(source.stage(content, 1), found)
        assert torch.equal(found, content)
    destination.abort()
    source.abort()


def test_an_allocation_is_opened_once_and_let_go_with_the_link(board: Served) -> None:
    memory, there = HostMemory(), HostMemory()
    source, destination = meet(board, [lambda: memory, lambda: there])
    assert isinstance(source, Window)
    assert isinstance(destination, Window)
    lies = Lies((memory.empty(10), memory.empty(20)), b"")
    first, again = (destination.addresses(source.show(lies, 0)) for _ in range(2))
    assert first == again
    assert set(first) <= there._opened.keys()
    destination.abort()
    assert not there._opened


class Asked(HostMemory):
    """shared: addresses of what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: list[int] = []

    def share(self, tensor: Tensor) -> Region:
        self.shared.append(tensor.data_ptr())
        return super().share(tensor)


def test_the_driver_is_asked_once_for_what_is_shown_again(board: Served) -> None:
    memory = Asked()
    source, destination = meet(board, [lambda: memory, HostMemory])
    assert isinstance(source, Window)
    assert isinstance(destination, Window)
    one, other = memory.empty(10), memory.empty(20)
    one.fill_(1)
    other.fill_(2)
    asked = len(memory.shared)
    for lies, content in (((one,), [1]), ((one,), [1]), ((other,), [2]), ((one, other), [1, 2])):
        shown = source.show(Lies(lies, b""), 0)
        assert [int(at(address, 1)) for address in destination.addresses(shown)] == content
        assert stands(destination, shown)
    assert memory.shared[asked:] == [each.data_ptr() for each in (one, other, one, other)]


def test_what_is_shown_stands_until_it_is_revoked_or_the_link_is_over(board: Served) -> None:
    memory = HostMemory()
    source, destination = meet(board, [lambda: memory, HostMemory])
    assert isinstance(source, Window)
    assert isinstance(destination, Window)
    lies = Lies((memory.empty(10),), b"")
    for seat, end in ((0, partial(source.revoke, 0)), (1, partial(source.revoke, 1)), (1, source.abort)):
        shown, other = source.show(lies, seat), source.show(lies, 2)
        source.stage(torch.ones(1), 0)
        assert stands(destination, shown)
        end()
        assert not stands(destination, shown)
        assert stands(destination, other) == (end != source.abort), "what is shown elsewhere"


def test_what_is_not_computed_yet_is_waited_for_a_moment(board: Served) -> None:
    there = HostMemory("there")
    source, destination = meet(board, [HostMemory, lambda: there])
    assert isinstance(source, Window)
    assert isinstance(destination, Window)
    assert source.waits
    memory, gate = source._memory, threading.Event()
    lies = Lies((memory.empty(10),), b"")
    shown = source.ahead(source.show(lies, 0), _never_mind(gate.wait))
    later = source.ahead(source.show(lies, 1), lambda: None)
    there.patience_s = 0.01
    early = read(destination, shown)
    assert not early.stands()
    assert early.is_early()
    there.patience_s = 10.0
    threading.Timer(0.05, gate.set).start()
    found = read(destination, later)
    assert gate.is_set(), "what was shown behind it was read before"
    for reading in (found, read(destination, shown)):
        assert reading.stands()
        assert not reading.is_early()
    for window in (destination, source):
        window.abort()


def test_a_wait_ends_when_the_reading_is_stopped_and_leaves_others_to_be_shown_again(board: Served) -> None:
    source, destination = meet(board, [HostMemory, partial(HostMemory, "there")])
    assert isinstance(source, Window)
    assert isinstance(destination, Window)
    memory, gate = source._memory, threading.Event()
    lies = Lies((memory.empty(10),), b"")
    shown = source.ahead(source.show(lies, 0), _never_mind(gate.wait))
    stopped = read(destination, source.show(lies, 1))
    threading.Timer(0.05, stopped.stop).start()
    waiting = read(destination, shown)
    assert not waiting.stands()
    assert waiting.is_early()
    assert not stopped.stands()
    assert not stopped.is_early()
    gate.set()
    assert stands(destination, shown)
    for window in (destination, source):
        window.abort()


def test_where_both_use_one_device_nothing_is_shown_ahead(board: Served) -> None:
    source, _ = meet(board, [HostMemory, HostMemory])
    assert isinstance(source, Window)
    assert not source.waits


def test_a_reading_that_could_not_be_launched_whole_has_ended_when_it_is_stopped(board: Served) -> None:
    """The part that was launched may be writing to pages."""
    source, destination = meet(board, [HostMemory, HostMemory])
    assert isinstance(source, Window)
    assert isinstance(destination, Window)
    lies, gate = Lies((source._memory.empty(10),), b""), threading.Event()
    reading = destination.read(source.show(lies, 0))
    destination.mark = lambda blocking: _Gated(gate)  # type: ignore[method-assign]
    destination.look = _fails  # type: ignore[method-assign]
    with pytest.raises(OSError, match="device lost"):
        reading.launch(lambda: None)
    threading.Timer(0.05, gate.set).start()
    reading.stop()
    assert gate.is_set()
    for window in (destination, source):
        window.abort()


class _Gated(Mark):
    def __init__(self, gate: threading.Event) -> None:
        super().__init__(None)
        self._gate = gate

    def __call__(self) -> None:
        self._gate.wait(30)


def _fails(shown: Shown) -> None:
    raise OSError("device lost")


def _never_mind(action: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        action()

    return run


def worker(name: str, memory: HostMemory, places: dict[str, Place]) -> Collective:
    make = partial(Window, make_memory=lambda: memory)
    made = Collective(name, HOST, make, lambda end: places[end.worker], timeout_s=20.0)
    made.reset(1)
    places[name] = made.place
    return made


class Crossing:
    """A ticket between pages that others get as soon as either side lets go of them, however that comes."""

    def __init__(self, number: int, memory: HostMemory, random: Random) -> None:
        self.number = number
        self.pause: Callable[[int], Any] = partial(_nap, random.choice((0.0, 0.0005)))
        self.want = torch.arange(POSITIONS, dtype=torch.int64) + number * POSITIONS
        self.kv, self.pages = memory.like(self.want), torch.zeros(POSITIONS, dtype=torch.int64)
        self.sent, self.received = threading.Event(), threading.Event()
        self.faults: list[str] = []

    def outgoing(self) -> Outgoing:
        read = lambda at: self.kv[at.start : at.stop]  # noqa: E731
        return Outgoing(self.number, End("b", 1), PIECES, read, self.leave, lambda _: Lies((self.kv,), b""))

    def leave(self, reason: str | None = None) -> None:
        """The source's pages are somebody else's."""
        self.kv.fill_(GARBAGE)
        self.sent.set()

    def incoming(self) -> Incoming:
        return Incoming(self.number, End("a", 1), PIECES, self._never, self._never, self._arrive, self._pull)

    def free(self) -> None:
        """The destination's pages are somebody else's."""
        self.pages.fill_(GARBAGE)
        self.received.set()

    def _pull(self, positions: range, addresses: Sequence[int], note: bytes) -> None:
        for position in positions:
            self.pause(position)
            self.pages[position] = at(addresses[0] + 8 * position, 8).view(torch.int64)[0]

    def _arrive(self, reason: str | None) -> None:
        self.reason = reason
        if reason is None and not torch.equal(self.pages, self.want):
            self.faults.append(f"arrived as {self.pages.tolist()}")
        self.free()

    def _never(self, *_: object) -> Any:
        raise AssertionError("what lies in shared memory needs no buffer")


@pytest.mark.parametrize("there", ["host", "there"])
@pytest.mark.parametrize("seed", range(6))
def test_what_arrives_is_what_was_sent_whenever_either_side_lets_go(seed: int, there: str) -> None:
    """And every ticket ends on both sides; offered when it is computed, or before."""
    random, memory, places = Random(seed), HostMemory(), dict[str, Place]()
    theirs = HostMemory(there)
    theirs.patience_s = random.choice((10.0, 0.001))
    a, b = worker("a", memory, places), worker("b", theirs, places)
    crossings = [Crossing(number, memory, random) for number in range(24)]
    steps: list[Callable[[], Any]] = []
    for crossing in crossings:
        mine: list[Callable[[], Any]] = [partial(a.send, crossing.outgoing())]
        stops = [*sorted(random.sample(range(1, POSITIONS), random.randrange(3))), POSITIONS]
        computed: tuple[Callable[[], None], ...] = (partial(time.sleep, 0.0003), Mark(None))
        mine += [partial(a.advance, crossing.number, stop, random.choice(computed)) for stop in stops]
        other: list[Callable[[], Any]] = [partial(b.receive, crossing.incoming())]
        ends = random.choice(("neither", "neither", "source", "destination", "both"))
        if ends in ("source", "both"):
            mine.insert(random.randrange(1, len(mine) + 1), partial(_close, a, crossing.number, crossing.leave))
        if ends in ("destination", "both"):
            other.append(partial(_close, b, crossing.number, crossing.free))
        steps = _shuffled(random, steps, _shuffled(random, mine, other))
    for step in steps:
        step()
        time.sleep(random.choice((0.0, 0.0, 0.002)))
    for crossing in crossings:
        assert crossing.sent.wait(30), f"the source of ticket {crossing.number} waits"
        assert crossing.received.wait(30), f"the destination of ticket {crossing.number} waits"
        assert not crossing.faults, crossing.faults
        assert (crossing.pages == GARBAGE).all(), "written after it was given up"
    a.shutdown()
    b.shutdown()


def _nap(seconds: float, _: int) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("at", [0, POSITIONS // 2, POSITIONS - 1])
def test_what_was_read_of_a_ticket_that_its_source_closed_meanwhile_is_nothing(at: int) -> None:
    memory, places = HostMemory(), dict[str, Place]()
    a, b = (worker(name, memory, places) for name in "ab")
    crossing, begun, gate = Crossing(0, memory, Random(0)), threading.Event(), threading.Event()

    def pause(position: int) -> None:
        if position == at:
            begun.set()
            gate.wait(30)

    crossing.pause = pause
    a.send(crossing.outgoing())
    a.advance(0, POSITIONS, lambda: None)
    b.receive(crossing.incoming())
    assert begun.wait(30)
    assert a.close(0)
    crossing.leave()
    gate.set()
    assert crossing.received.wait(30)
    assert "gave it up" in (crossing.reason or "")
    for side in (a, b):
        side.shutdown()


def _close(side: Collective, ticket: int, let_go: Callable[[], None]) -> None:
    if side.close(ticket):
        let_go()


def _shuffled(random: Random, one: list[Any], other: list[Any]) -> list[Any]:
    """Both, each in its own order."""
    turns = [0] * len(one) + [1] * len(other)
    random.shuffle(turns)
    queues = iter(one), iter(other)
    return [next(queues[turn]) for turn in turns]


def _linked(memory: HostMemory, there: HostMemory) -> tuple[Collective, Collective]:
    """Two workers that have met."""
    places: dict[str, Place] = {}
    a, b = worker("a", memory, places), worker("b", there, places)
    first = Crossing(99, memory, Random(0))
    a.send(first.outgoing())
    a.advance(99, POSITIONS, lambda: None)
    b.receive(first.incoming())
    assert first.received.wait(30)
    assert first.sent.wait(30)
    return a, b


def _offers(side: Collective) -> int:
    """How many of its offers are not answered for."""
    return sum(key.endswith("/offer") for key in list(side._ways.board._values))


def _wait_until(so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not so():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "later"])
def test_the_next_are_offered_while_one_is_read_as_far_as_there_are_seats(later: bool) -> None:
    """Also those that come when the source has nothing more to do than to wait for answers."""
    memory, gate = HostMemory(), threading.Event()
    a, b = _linked(memory, HostMemory("there"))
    crossings = [Crossing(number, memory, Random(0)) for number in range(SEATS + 2)]
    crossings[0].pause = lambda _: gate.wait(30)
    for crossing in crossings:
        b.receive(crossing.incoming())
        a.send(crossing.outgoing())
        a.advance(crossing.number, POSITIONS, Mark(None))
        if later:
            time.sleep(0.05)
    _wait_until(lambda: _offers(a) == SEATS)
    time.sleep(0.05)
    assert _offers(a) == SEATS
    gate.set()
    for crossing in crossings:
        assert crossing.received.wait(30)
        assert crossing.reason is None
        assert not crossing.faults
    for side in (a, b):
        side.shutdown()


def test_a_reading_that_fails_ends_its_ticket_and_others_are_offered_again_through_one_new_link() -> None:
    memory, gate = HostMemory(), threading.Event()
    a, b = _linked(memory, HostMemory("there"))
    crossings = [Crossing(number, memory, Random(0)) for number in range(SEATS)]

    def fail(_: int) -> None:
        gate.wait(30)
        raise OSError("device lost")

    crossings[0].pause = fail
    for crossing in crossings:
        b.receive(crossing.incoming())
        a.send(crossing.outgoing())
        a.advance(crossing.number, POSITIONS, Mark(None))
    _wait_until(lambda: _offers(a) == SEATS)
    gate.set()
    for crossing in crossings:
        assert crossing.received.wait(30)
        assert crossing.sent.wait(30)
        assert not crossing.faults
    assert "device lost" in (crossings[0].reason or "")
    assert [crossing.reason for crossing in crossings[1:]] == [None] * (SEATS - 1)
    links = {key.split("/")[1] for key in a._ways.board._values if "/link" in key}
    assert links == {"link1", "link2"}
    for side in (a, b):
        side.shutdown()


def test_pieces_that_are_offered_again_may_follow_the_last_ones() -> None:
    """Those of a link that the destination has given up, of which the source did not know."""
    memory, gate = HostMemory(), threading.Event()
    a, b = _linked(memory, HostMemory("there"))
    broken, crossing = (Crossing(number, memory, Random(0)) for number in range(2))

    def fail(_: int) -> None:
        raise OSError("device lost")

    broken.pause = fail
    for one in (broken, crossing):
        b.receive(one.incoming())
        a.send(one.outgoing())
    a.advance(0, POSITIONS, Mark(None))
    assert broken.received.wait(30)
    assert broken.sent.wait(30)
    for stop in (PIECES[0].stop, POSITIONS):
        a.advance(1, stop, _never_mind(partial(gate.wait, 30)))
    gate.set()
    assert crossing.received.wait(30)
    assert crossing.sent.wait(30)
    assert not crossing.faults
    assert crossing.reason is None
    for side in (a, b):
        side.shutdown()


@pytest.mark.parametrize("patience_s", [10.0, 0.01])
def test_the_last_pieces_are_offered_before_they_are_computed_and_read_after(patience_s: float) -> None:
    """However long that takes."""
    memory, there, gate = HostMemory(), HostMemory("there"), threading.Event()
    a, b = _linked(memory, there)
    there.patience_s = patience_s
    crossing = Crossing(0, memory, Random(0))
    crossing.kv.fill_(0)
    b.receive(crossing.incoming())
    a.send(crossing.outgoing())

    def computed() -> None:
        gate.wait(30)
        crossing.kv.copy_(crossing.want)

    a.advance(0, POSITIONS, computed)
    _wait_until(lambda: _offers(a) == 1)
    assert not crossing.received.wait(0.1)
    gate.set()
    assert crossing.received.wait(30)
    assert not crossing.faults
    assert crossing.sent.wait(30)
    for side in (a, b):
        side.shutdown()


@pytest.mark.parametrize("closes", ["source", "destination"])
def test_a_ticket_closed_before_what_was_offered_is_computed_ends_both_sides(closes: str) -> None:
    memory, gate = HostMemory(), threading.Event()
    a, b = _linked(memory, HostMemory("there"))
    crossing, next_one = (Crossing(number, memory, Random(0)) for number in range(2))
    b.receive(crossing.incoming())
    a.send(crossing.outgoing())
    a.advance(0, POSITIONS, _never_mind(partial(gate.wait, 30)))
    _wait_until(lambda: _offers(a) == 1)
    if closes == "source":
        _close(a, 0, crossing.leave)
    else:
        _close(b, 0, crossing.free)
    gate.set()
    assert crossing.sent.wait(30)
    assert crossing.received.wait(30)
    assert not crossing.faults
    b.receive(next_one.incoming())
    a.send(next_one.outgoing())
    a.advance(1, POSITIONS, lambda: None)
    assert next_one.received.wait(30)
    assert not next_one.faults
    _wait_until(lambda: _offers(a) == 0)
    for side in (a, b):
        side.shutdown()


def _dying(pipe: Any, there: Place) -> None:
    memory, places = HostMemory(), {"b": there}
    a = worker("a", memory, places)
    pipe.send(a.place)
    whole = Crossing(0, memory, Random(0))
    a.send(whole.outgoing())
    a.advance(0, POSITIONS, lambda: None)
    pipe.recv()
    os._exit(9)


def test_memory_of_a_source_that_died_is_let_go_at_once_though_nothing_is_to_come() -> None:
    memory, places = HostMemory(), dict[str, Place]()
    b = worker("b", memory, places)
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_dying, args=(there, b.place))
    child.start()
    places["a"] = here.recv()
    whole = Crossing(0, memory, Random(0))
    b.receive(whole.incoming())
    assert whole.received.wait(30)
    assert not whole.faults
    assert memory._opened
    here.send(None)
    child.join()
    deadline_s = time.monotonic() + 30
    while memory._opened:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    b.shutdown()
