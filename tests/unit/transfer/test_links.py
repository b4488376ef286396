"""Which link two workers make, and the shared memory that a link of CUDA counts in."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from distspec.errors import TransferFailed
from distspec.transfer.group import Gloo, Group, Rendezvous
from distspec.transfer.ipc import Counters, NoSharedMemory
from distspec.transfer.links import link
from distspec.transfer.meeting import Served

HOST = "127.0.0.1"
NONCE = bytes(range(16))
FILLED = 0


@pytest.fixture
def board() -> Iterator[Served]:
    made = Served(HOST)
    yield made
    made.close()


def pair(kind: str, board: Served, devices: tuple[str, str]) -> list[Group]:
    def make(rank: int) -> Group:
        store = Rendezvous(board, "a>b", 60.0)
        return link(kind, store, rank, device=torch.device(devices[rank]), host=HOST, timeout_s=60.0)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(make, range(2)))


@pytest.mark.parametrize("kind", ["gloo", "auto"])
def test_ends_without_a_gpu_meet_by_gloo_and_what_is_sent_arrives(board: Served, kind: str) -> None:
    source, destination = pair(kind, board, ("cpu", "cpu"))
    assert isinstance(source, Gloo)
    sent, found = torch.randn(7), torch.zeros(7)
    landed = destination.receive(found)
    source.send(sent)()
    landed()
    assert torch.equal(found, sent)


@pytest.mark.parametrize("gpus", [("one", ""), ("", "two"), ("one", "one")])
def test_gloo_where_an_end_has_no_gpu_or_both_have_one_whose_memory_they_do_not_share(
    board: Served, monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, str]
) -> None:
    """Devices of this processor that are said to be GPUs; no CUDA is there to share memory."""
    monkeypatch.setattr("distspec.transfer.links._gpu", lambda device: gpus[device.index])
    monkeypatch.setattr("distspec.transfer.links.Ipc", _nothing_shared)
    assert [type(group) for group in pair("auto", board, ("cpu:0", "cpu:1"))] == [Gloo, Gloo]


def _nothing_shared(*_: object, **__: object) -> Group:
    raise NoSharedMemory("none here")


def memory() -> int:
    file = os.memfd_create("test")
    os.write(file, bytes(32) + NONCE)
    return file


def test_what_one_side_counts_the_other_sees() -> None:
    file = memory()
    one, other = Counters(file, NONCE, os.getpid()), Counters(file, NONCE, os.getpid())
    waiting = threading.Thread(target=partial(other.wait, FILLED, 2, 60.0))
    waiting.start()
    one.set(FILLED, 1)
    waiting.join(0.05)
    assert waiting.is_alive()
    one.set(FILLED, 2)
    waiting.join(30)
    assert not waiting.is_alive()
    os.close(file)


def test_memory_of_somebody_else_is_not_taken_for_the_peers() -> None:
    file = memory()
    with pytest.raises(NoSharedMemory, match="another"):
        Counters(file, NONCE[::-1], os.getpid())
    with pytest.raises(NoSharedMemory):
        Counters(os.open(os.devnull, os.O_RDWR), NONCE, os.getpid())
    os.close(file)


def test_who_waits_for_a_dead_peer_or_a_broken_link_is_told() -> None:
    file = memory()
    child = os.fork()
    if not child:
        os._exit(0)
    with pytest.raises(TransferFailed, match="died"):
        Counters(file, NONCE, child).wait(FILLED, 1, 60.0)
    os.waitpid(child, 0)
    with pytest.raises(TransferFailed, match="died"):
        Counters(file, NONCE, child).wait(FILLED, 1, 60.0)
    with pytest.raises(TransferFailed, match="nothing of the peer"):
        Counters(file, NONCE, os.getpid()).wait(FILLED, 1, 0.2)
    broken = Counters(file, NONCE, os.getpid())
    broken.set(2, 1)
    with pytest.raises(TransferFailed, match="gave the link up"):
        broken.wait(FILLED, 1, 60.0)
    os.close(file)
