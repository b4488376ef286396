"""What a capture that fails comes to, without a device that has graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from distspec.engine.capture import Capturing, captured, is_out_of_memory
from tests.replays import Replays

ENDED = "operation failed due to a previous error during capture"


def raised(cause: Exception) -> RuntimeError:
    """As a capture ends where something within it fails."""
    try:
        try:
            raise cause
        finally:
            raise RuntimeError(ENDED)
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "cause",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_memory_that_ran_out_is_told_by_whoever_needed_it(cause: Exception) -> None:
    assert is_out_of_memory(cause)
    assert is_out_of_memory(raised(cause))


def test_other_errors_are_not_taken_for_it() -> None:
    for cause in (RuntimeError("CUDA error: invalid argument"), ValueError("out of memory, as a request says")):
        assert not is_out_of_memory(cause)
        assert not is_out_of_memory(raised(cause))


def failing(cause: Exception) -> Callable[[], None]:
    def compute() -> None:
        raise raised(cause)

    return compute


def test_only_memory_that_ran_out_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert captured(Replays(), failing(RuntimeError("CUDA error: out of memory")), "steps of 8 rows") is None
    assert "out of memory while capturing a CUDA graph of steps of 8 rows" in caplog.text
    with pytest.raises(RuntimeError, match=ENDED):
        captured(Replays(), failing(RuntimeError("CUDA error: invalid argument")), "steps of 8 rows")
    found = captured(Replays(), lambda: 7, "steps of 8 rows")
    assert found is not None
    assert found.result == 7


class Stream:
    """launched: what it has still to do."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        pass

    def synchronize(self) -> None:
        self.launched.clear()


def test_where_memory_ends_before_a_capture_what_was_launched_is_done_before_it_is_launched_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels of two streams would write to one buffer: attention's counts of splits, and what splits leave."""
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())

    def compute() -> None:
        stream.launched.append("the first layers")
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    assert captured(Capturing(torch.device("cpu")), compute, "steps of 8 rows") is None
    assert not stream.launched
