"""The board: values once set are there, waits are bounded, strangers and the dead are told."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue

import pytest

from distspec.errors import TransferFailed
from distspec.transfer.meeting import Missing, Place, Served, Visited

HOST = "127.0.0.1"
CHALLENGE, WELCOME = (
    len(said).to_bytes(4, "big") + said for said in (b"#CHALLENGE#{sha256}" + b"?" * 40, b"#WELCOME#")
)
"""What a board says first, in the frames of multiprocessing.connection."""


@pytest.fixture
def board() -> Iterator[Served]:
    made = Served(HOST)
    yield made
    made.close()


def test_what_one_sets_the_others_get(board: Served) -> None:
    first, second = Visited(board.place), Visited(board.place)
    first.set("a", b"\x00\xff")
    board.set("b", b"")
    assert second.get("a", 60) == board.get("a", 60) == b"\x00\xff"
    assert second.get("b", 60) == b""
    second.delete("a")
    with pytest.raises(Missing):
        first.get("a", 0)
    assert first.get("b", 0) == b""


def test_a_get_waits_for_a_later_set(board: Served) -> None:
    visitor = Visited(board.place)
    timer = threading.Timer(0.05, board.set, ("late", b"x"))
    timer.start()
    assert visitor.get("late", 30) == b"x"
    with pytest.raises(Missing):
        visitor.get("never", 0.05)


def test_threads_that_ask_over_one_connection_get_their_own_answers(board: Served) -> None:
    visitor, keys = Visited(board.place), [str(number) for number in range(40)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda key: visitor.set(key, key.encode()), keys))
        assert list(threads.map(lambda key: visitor.get(key, 30), keys)) == [key.encode() for key in keys]


def test_only_holders_of_the_secret_may_connect_and_others_do_no_harm(board: Served) -> None:
    with pytest.raises(TransferFailed):
        Visited(Place(HOST, board.place.port, b"?" * 32))
    with socket.create_connection((HOST, board.place.port)) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    silent = socket.create_connection((HOST, board.place.port))
    Visited(board.place).set("a", b"1")
    silent.close()


@pytest.mark.parametrize("says", [b"", b"\0"])
def test_a_stranger_is_cut_off_and_leaves_no_thread(board: Served, says: bytes) -> None:
    before = threading.active_count()
    with socket.create_connection((HOST, board.place.port)) as silent:
        silent.sendall(says)  # a part of a frame, of which the rest never comes
        silent.settimeout(60)
        while silent.recv(4096):
            pass  # the challenge, then the end
    while threading.active_count() > before:
        time.sleep(0.01)
    Visited(board.place).set("a", b"1")


def test_strangers_beyond_a_number_are_turned_away_and_then_welcome_again() -> None:
    few = Served(HOST, strangers=2)
    with ExitStack() as stack:
        stack.callback(few.close)
        known = Visited(few.place)
        known.set("a", b"0")  # answered, so it is no stranger any more
        before = threading.active_count()
        crowd = [stack.enter_context(socket.create_connection((HOST, few.place.port), 60)) for _ in range(2)]
        assert all(member.recv(4) for member in crowd)
        with socket.create_connection((HOST, few.place.port), 60) as late:
            assert not late.recv(4)
        known.set("a", b"1")
        for member in crowd:
            while member.recv(4096):
                pass
        while threading.active_count() > before:  # who was cut off makes room a moment after it is told
            time.sleep(0.01)
        assert Visited(few.place).get("a", 0) == b"1"


def test_a_board_that_is_gone_or_silent_is_told(board: Served) -> None:
    visitor = Visited(board.place)
    visitor._connection.close()
    with pytest.raises(TransferFailed):
        visitor.set("a", b"1")
    with pytest.raises(TransferFailed):
        Visited(Place(HOST, 1, b"?" * 32))


@pytest.mark.parametrize("says", [[], [CHALLENGE], [CHALLENGE[:9]], [CHALLENGE, WELCOME], [CHALLENGE, WELCOME[:5]]])
def test_a_visitor_waits_for_no_board_that_falls_silent(says: list[bytes]) -> None:
    """A process that was stopped, or a host that is gone, in the midst of what is said first."""
    with socket.create_server((HOST, 0)) as server:
        heard: list[socket.socket] = []

        def stop_short() -> None:
            heard.append(server.accept()[0])
            for part in says:
                heard[0].sendall(part)

        with ThreadPoolExecutor(2) as threads:
            threads.submit(stop_short)
            visit = threads.submit(Visited, Place(HOST, server.getsockname()[1], b"?" * 32))
            try:
                with pytest.raises(TransferFailed):
                    visit.result(30)
            finally:
                heard[0].close()


def test_both_ends_hear_of_a_host_that_is_gone_though_they_say_nothing(
    board: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP alone tells nobody who only listens; it does where it was told to ask."""
    served: SimpleQueue[int] = SimpleQueue()
    monkeypatch.setattr(board, "_answer_all", lambda connection: served.put(os.dup(connection.fileno())))
    visitor = Visited(board.place)
    for end in (os.dup(visitor._connection.fileno()), served.get(timeout=30)):
        with socket.socket(fileno=end) as peer:
            assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            silence_s = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            silence_s += 3 * peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            assert silence_s < 300


def test_a_secret_is_not_shown(board: Served) -> None:
    assert board.place.secret.hex() not in repr(board.place)
    assert repr(board.place.secret) not in repr(board.place)
