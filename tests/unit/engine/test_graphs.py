"""What is known of graphs without a device that has them."""

from __future__ import annotations

import pytest
import torch

from distspec.engine.graphs import is_out_of_memory

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
