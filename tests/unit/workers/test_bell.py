"""A bell: no ring is missed, whoever rings when, and no wait is longer than was said."""

from __future__ import annotations

import os
import select
import threading

from distspec.workers.bell import Bell


def test_a_ring_before_a_wait_ends_it_and_counts_once() -> None:
    bell = Bell()
    for _ in range(3):
        bell.ring()
    bell.wait(None)
    assert not select.select([bell._descriptor], [], [], 0)[0]


def test_no_ring_is_missed() -> None:
    """Two threads that take turns: one missed ring would stop both."""
    here, there = Bell(), Bell()

    def answer() -> None:
        for _ in range(500):
            there.wait(None)
            here.ring()

    other = threading.Thread(target=answer)
    other.start()
    for _ in range(500):
        there.ring()
        here.wait(None)
    other.join(30)
    assert not other.is_alive()


def test_another_descriptor_ends_a_wait_and_keeps_what_is_in_it() -> None:
    bell = Bell()
    reading, writing = os.pipe()
    try:
        os.write(writing, b"x")
        bell.wait(None, reading)
        bell.wait(None, reading)
        assert os.read(reading, 2) == b"x"
    finally:
        os.close(reading)
        os.close(writing)


def test_waits_shorter_than_poll_can_tell_end_as_well() -> None:
    bell = Bell()
    for timeout_s in (0.0, 1e-6, 5e-4, 1.5e-3):
        bell.wait(timeout_s)
