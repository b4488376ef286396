"""Calls that know no limit get one."""

from __future__ import annotations

import threading

import pytest

from distspec.errors import TransferFailed
from distspec.transfer.group import within


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
