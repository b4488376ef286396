"""A signal waits for what must not be torn off, and whoever handles it hears of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from distspec.serving.signals import held_back

SIGNALS = [signal.SIGINT, signal.SIGTERM]


class Heard(Exception):
    """What a handler raises."""


@pytest.fixture(autouse=True)
def heard() -> Iterator[list[int]]:
    """What handlers were called with; each ends what it interrupts."""
    found: list[int] = []

    def hear(number: int, _: object) -> None:
        found.append(number)
        raise Heard

    before = {number: signal.signal(number, hear) for number in SIGNALS}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def _within(*signals: signal.Signals) -> int:
    """How many signals a block has survived that gets these."""
    survived = 0
    with suppress(Heard), held_back():
        for number in signals:
            signal.raise_signal(number)
            survived += 1
    return survived


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_waits_until_the_block_has_ended(number: signal.Signals, heard: list[int]) -> None:
    assert _within(number) == 1
    assert heard == [number]


def test_a_second_signal_does_not_wait(heard: list[int]) -> None:
    assert _within(signal.SIGINT, signal.SIGTERM) == 1
    assert heard == [signal.SIGTERM]


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_are_those_from_before_whatever_the_block_sets(fails: bool) -> None:
    """As Ray sets its own for SIGTERM."""
    for number in SIGNALS:
        before = signal.getsignal(number)
        with suppress(RuntimeError), held_back():
            signal.signal(number, signal.SIG_IGN)
            if fails:
                raise RuntimeError
        assert signal.getsignal(number) is before


def test_a_signal_without_a_handler_is_left_alone() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with held_back():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_thread_may_hold_none_and_is_not_stopped() -> None:
    done: list[bool] = []

    def work() -> None:
        with held_back():
            done.append(True)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is before
