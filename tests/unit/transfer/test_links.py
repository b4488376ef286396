"""Which link two workers make."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from distspec.transfer.group import Gloo, Rendezvous
from distspec.transfer.lane import Link
from distspec.transfer.links import link
from distspec.transfer.meeting import Served
from distspec.transfer.window import NoSharedMemory

HOST = "127.0.0.1"


@pytest.fixture
def board() -> Iterator[Served]:
    made = Served(HOST)
    yield made
    made.close()


def pair(kind: str, board: Served, devices: tuple[str, str]) -> list[Link]:
    def make(rank: int) -> Link:
        store = Rendezvous(board, "a>b", 60.0)
        return link(kind, store, rank, device=torch.device(devices[rank]), host=HOST, timeout_s=60.0)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(make, range(2)))


@pytest.mark.parametrize("kind", ["gloo", "auto"])
def test_ends_without_a_gpu_meet_by_gloo_and_what_is_sent_arrives(board: Served, kind: str) -> None:
    source, destination = pair(kind, board, ("cpu", "cpu"))
    assert isinstance(source, Gloo)
    assert isinstance(destination, Gloo)
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
    monkeypatch.setattr("distspec.transfer.links.CudaMemory", _nothing_shared)
    assert [type(group) for group in pair("auto", board, ("cpu:0", "cpu:1"))] == [Gloo, Gloo]


def _nothing_shared(*_: object, **__: object) -> None:
    raise NoSharedMemory("none here")
