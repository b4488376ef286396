"""The board: values once set are there, waits are bounded, strangers and the dead are told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from distspec.errors import TransferFailed
from distspec.transfer.meeting import Missing, Place, Served, Visited

HOST = "127.0.0.1"


@pytest.fixture
def board() -> Iterator[Served]:
    made = Served(HOST)
    yield made
    made.close()


def test_what_one_sets_the_others_get(board: Served) -> None:
    first, second = Visited(board.place), Visited(board.place)
    first.set("a", b"\x00\xff")
    board.set("b", b"")
    assert second.get("a", 5) == board.get("a", 5) == b"\x00\xff"
    assert second.get("b", 5) == b""
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


def test_only_holders_of_the_secret_may_connect_and_others_do_no_harm(board: Served) -> None:
    with pytest.raises(TransferFailed):
        Visited(Place(HOST, board.place.port, b"?" * 32))
    with socket.create_connection((HOST, board.place.port)) as noise:
        noise.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    silent = socket.create_connection((HOST, board.place.port))
    Visited(board.place).set("a", b"1")
    silent.close()


def test_a_board_that_is_gone_or_silent_is_told(board: Served) -> None:
    visitor = Visited(board.place)
    visitor._connection.close()
    with pytest.raises(TransferFailed):
        visitor.set("a", b"1")
    with socket.create_server((HOST, 0)) as mute, pytest.raises(TransferFailed, match="no challenge"):
        Visited(Place(HOST, mute.getsockname()[1], b"?" * 32))
    with pytest.raises(TransferFailed):
        Visited(Place(HOST, 1, b"?" * 32))


def test_a_secret_is_not_shown(board: Served) -> None:
    assert board.place.secret.hex() not in repr(board.place)
    assert repr(board.place.secret) not in repr(board.place)
