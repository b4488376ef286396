"""A window: who sees whose memory, and that what was read where it lies counts only while it was the ticket's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from distspec.transfer.base import Lies
from distspec.transfer.group import Rendezvous
from distspec.transfer.meeting import Served
from distspec.transfer.window import Memory, NoSharedMemory, Region, Window
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
    shown = source.show(Lies((lies,), b"three rows"))
    assert shown.note == b"three rows"
    [address] = destination.addresses(shown)
    assert torch.equal(at(address, lies.nbytes).view(torch.float32), lies.flatten())
    for size in (7, 9 << 20, 3):
        content, found = torch.randn(size), torch.empty(size)
        destination.fetch(source.stage(content), found)
        assert torch.equal(found, content)
    destination.abort()
    source.abort()


def test_an_allocation_is_opened_once_and_let_go_with_the_link(board: Served) -> None:
    memory, there = HostMemory(), HostMemory()
    source, destination = meet(board, [lambda: memory, lambda: there])
    assert isinstance(source, Window)
    assert isinstance(destination, Window)
    lies = Lies((memory.empty(10), memory.empty(20)), b"")
    first, again = (destination.addresses(source.show(lies)) for _ in range(2))
    assert first == again
    assert set(first) <= there._opened.keys()
    destination.abort()
    assert not there._opened
