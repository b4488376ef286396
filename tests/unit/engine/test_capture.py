"""What a capture that fails comes to, without a device that has graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from distspec.engine.capture import captured, is_out_of_memory
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
