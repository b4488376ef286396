"""CUDA graphs: what was launched kernel by kernel once is launched as one from then on.

Knows a device, the memory that its graphs share, and what to do where memory ends. Does not know what is captured.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Captured(Generic[T]):
    """replay: launches all of it once more. result: what it leaves, until the next replay."""

    replay: Callable[[], None]
    result: T


class Capture(Protocol):
    def __call__(self, compute: Callable[[], T]) -> Captured[T]:
        """What `compute` launches, which reads and writes the same memory each time and waits for nothing. It is called
        more than once."""
        ...


class Capturing:
    """See Capture. All graphs share their memory: they must be replayed in one stream."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], T]) -> Captured[T]:
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                compute()  # kernels are compiled, workspaces allocated
        finally:  # where memory ends within, the same is launched in the other stream next
            self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, as links of other workers do.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        # A capture that fails does not go back to the stream that was current: the one around it does.
        with _uncollected(), torch.cuda.stream(torch.cuda.current_stream()), capture:
            result = compute()
        return Captured(graph.replay, result)


@contextmanager
def _uncollected() -> Iterator[None]:
    """A graph that the garbage collector finds, of an engine that is gone, would end a capture in the same thread."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def capturing(device: torch.device) -> Capture | None:
    """None on a device that has no graphs."""
    return Capturing(device) if device.type == "cuda" else None


def captured(capture: Capture, compute: Callable[[], T], what: str) -> Captured[T] | None:
    """None, with a warning that says of what, if memory is too short."""
    try:
        return capture(compute)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    torch.cuda.empty_cache()
    log.warning(
        "out of memory while capturing a CUDA graph of %s: they are launched kernel by kernel; lower "
        "engine.gpu_memory_utilization, or engine.max_num_seqs",
        what,
    )
    return None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether this, or what it came from, is that: a capture that fails ends with an error of its own. The driver and
    Triton, who need memory of the device for graphs and kernels, only say so."""
    while error is not None and not isinstance(error, torch.cuda.OutOfMemoryError):
        if isinstance(error, RuntimeError) and "out of memory" in str(error):
            return True
        error = error.__context__
    return error is not None
