"""The compute thread: in order, idle without steps, and a work that broke says nothing until its next life."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest

from distspec.protocol.channel import Link
from distspec.protocol.messages import Cancel, Fault, Message
from distspec.workers.compute import Compute


class Life:
    """Stands for a link of which only the incarnation matters, and what it brings when it is looked at: `letters`."""

    descriptor = None

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.letters: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def receive(self) -> None:
        while not self.letters.empty():
            self.letters.get()()


class Echo:
    """Answers at once what is even, after a step what is odd, and breaks at `boom`; at 4013 when it is asked whether it
    is ready. least: of what waits, that a step waits for. is_called: ends its steps, each of which has `begun`.
    """

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.threads: set[int] = set()
        self.lives: list[int] = []
        self.steps = 0
        self.leaks = False
        self.least = 0
        self.begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.is_called: Callable[[], bool] = lambda: True

    def receive(self, message: Message) -> Sequence[Message]:
        self.threads.add(threading.get_ident())
        assert isinstance(message, Cancel)
        if message.key == "boom":
            raise ZeroDivisionError
        if int(message.key) % 2 == 0:
            return [Fault(reason=message.key)]
        self.waiting.append(message.key)
        return []

    def ready(self) -> bool:
        if "4013" in self.waiting:
            raise ZeroDivisionError
        return bool(self.waiting)

    def hold_s(self) -> float:
        return 60.0 if len(self.waiting) < self.least else 0.0

    def step(self) -> Sequence[Message]:
        self.threads.add(threading.get_ident())
        self.steps += 1
        self.begun.put(self.steps)
        ends_s = time.monotonic() + 30
        while not self.is_called():
            assert time.monotonic() < ends_s
        said, self.waiting = self.waiting, []
        return [Fault(reason=key) for key in said]

    def reset(self, incarnation: int) -> None:
        self.lives.append(incarnation)
        self.waiting.clear()

    def check(self) -> None:
        assert not self.leaks


class Desk:
    def __init__(self) -> None:
        self.work = Echo()
        self.said: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        self.broken: queue.SimpleQueue[tuple[int, Exception]] = queue.SimpleQueue()
        self.began: list[tuple[int, list[int]]] = []
        self.compute = Compute(self.work, self._reply, self._broke, self._begin)
        self.compute.start()

    def _reply(self, link: Link, messages: Sequence[Message]) -> None:
        for message in messages:
            assert isinstance(message, Fault)
            if message.reason == "4066":
                raise ZeroDivisionError
            self.said.put((link.incarnation, message.reason))

    def _broke(self, link: Link, error: Exception) -> None:
        self.broken.put((link.incarnation, error))

    def _begin(self) -> None:
        self.began.append((threading.get_ident(), list(self.work.lives)))

    def join(self, incarnation: int) -> None:
        self.compute.join_as(cast(Any, Life(incarnation)))

    def take(self, *keys: object) -> None:
        self.compute.take([Cancel(key=str(key)) for key in keys])

    def hear(self, count: int) -> list[tuple[int, str]]:
        return [self.said.get(timeout=30) for _ in range(count)]


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.compute.stop()
    made.compute.join(30)
    assert not made.compute.is_alive()


def test_everything_is_answered_on_one_thread(desk: Desk) -> None:
    desk.join(1)
    desk.take(*range(100))
    assert sorted(int(said) for _, said in desk.hear(100)) == list(range(100))
    assert len(desk.work.threads) == 1


def test_the_thread_is_prepared_once_before_it_computes(desk: Desk) -> None:
    for incarnation in (1, 2):
        desk.join(incarnation)
        desk.take(incarnation)
        desk.hear(1)
    assert desk.began == [(thread, []) for thread in desk.work.threads]


def test_nothing_is_stepped_while_nothing_is_ready(desk: Desk) -> None:
    desk.join(1)
    desk.take(0, 2, 4)
    desk.hear(3)
    desk.compute.check().result(30)
    assert desk.work.steps == 0


def test_replies_belong_to_the_life_that_asked(desk: Desk) -> None:
    desk.join(1)
    desk.take(2)
    desk.join(2)
    desk.take(4)
    assert desk.hear(2) == [(1, "2"), (2, "4")]
    assert desk.work.lives == [1, 2]


def test_before_a_life_messages_go_nowhere(desk: Desk) -> None:
    desk.take(2)
    desk.join(1)
    desk.take(4)
    assert desk.hear(1) == [(1, "4")]


@pytest.mark.parametrize("key", ["boom", 4013, 4066])
def test_a_work_that_broke_is_silent_until_its_next_life(desk: Desk, key: object) -> None:
    """In what it takes, in what says whether there is a step, in what is said: none of it ends the thread."""
    desk.join(1)
    desk.take(key)
    incarnation, error = desk.broken.get(timeout=30)
    assert (incarnation, type(error)) == (1, ZeroDivisionError)
    desk.take(2, 3)
    desk.join(2)
    desk.take(6)
    assert desk.hear(1) == [(2, "6")]
    assert desk.broken.empty()


@pytest.mark.parametrize("leaks", [False, True])
def test_a_proof_is_answered_between_two_lives(desk: Desk, leaks: bool) -> None:
    desk.work.leaks = leaks
    before = desk.compute.check()
    desk.join(1)
    desk.take("boom")
    for proof in (before, desk.compute.check()):
        assert isinstance(proof.exception(30), AssertionError if leaks else type(None))


def test_a_proof_reports_what_it_found_and_breaks_nothing(desk: Desk) -> None:
    desk.join(1)
    assert desk.compute.check().result(30) is None
    desk.work.leaks = True
    with pytest.raises(AssertionError):
        desk.compute.check().result(30)
    desk.take(2)
    assert desk.hear(1) == [(1, "2")]


def test_a_step_that_is_worth_a_wait_begins_when_the_others_have_come(desk: Desk) -> None:
    desk.work.least = 3
    desk.join(1)
    desk.take(1, 3)
    desk.take(2)
    assert desk.hear(1) == [(1, "2")], "while it waits it takes what comes"
    desk.take(5)
    assert desk.hear(3) == [(1, "1"), (1, "3"), (1, "5")]
    assert desk.work.steps == 1


@pytest.mark.parametrize("by_link", [False, True])
def test_a_long_step_hears_that_something_has_arrived(desk: Desk, by_link: bool) -> None:
    """Whoever brings it: another thread, or the link that this one looks at."""
    life, desk.work.is_called = Life(1), desk.compute.is_called
    desk.compute.join_as(cast(Any, life))
    desk.take(1)
    assert desk.work.begun.get(timeout=30) == 1
    assert desk.said.empty()
    if by_link:
        life.letters.put(lambda: desk.take(2))
    else:
        desk.take(2)
    assert desk.hear(2) == [(1, "1"), (1, "2")]
