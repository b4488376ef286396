"""Calls that know no limit get one."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from distspec.engine.capture import Capturing
from distspec.engine.rolling.copies import Copies
from distspec.errors import TransferFailed
from distspec.transfer import group
from distspec.transfer.aside import Aside
from distspec.transfer.group import Nccl, within


def test_a_call_that_does_not_return_is_left_behind() -> None:
    gate = threading.Event()
    with pytest.raises(TransferFailed, match="nothing of the peer"):
        within(0.05, gate.wait)
    gate.set()


def test_what_a_call_returns_or_raises_comes_through() -> None:
    def fails() -> None:
        raise TimeoutError("its own")

    assert within(30.0, lambda: 7) == 7
    with pytest.raises(TimeoutError, match="its own"):
        within(30.0, fails)


def test_a_link_of_nccl_has_no_stream_of_those_who_must_not_wait_for_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many links there were before: torch has 32 streams of each priority, and deals them in turns."""
    dealt: Counter[int] = Counter()
    device = torch.device("cuda")

    def deal(device: torch.device, priority: int = 0) -> tuple[int, int]:
        dealt[priority] += 1
        return priority, dealt[priority] % 32

    nccl = SimpleNamespace(ProcessGroupNCCL=lambda *_: None)
    nccl.ProcessGroupNCCL.Options = SimpleNamespace
    monkeypatch.setattr(group, "_dist", nccl)
    monkeypatch.setattr(torch.cuda, "Stream", deal)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    others = {Capturing(device)._stream, Copies(device)._stream, Aside(device)._stream}
    links = {Nccl(None, 0, device=device, timeout_s=1.0)._stream for _ in range(40)}
    assert others.isdisjoint(links)
