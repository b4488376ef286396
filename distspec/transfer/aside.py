"""A stream beside the one that computes, on which threads of a transport copy.

Knows a device. Does not know what is computed or copied. On a CPU there is nothing to order: whoever launched something
there has computed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from distspec.transfer.base import Computed


class Mark:
    """What a thread has launched before it was made. event: behind that; None on a CPU. A `Computed`."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def __call__(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def is_done(self) -> bool:
        return self.event is None or bool(self.event.query())


def is_done(computed: Computed) -> bool:
    """False where that is not known."""
    return isinstance(computed, Mark) and computed.is_done()


def hold(computed: Computed) -> None:
    """What is launched on the present stream from now on comes after that: this thread waits only where no stream
    can."""
    if isinstance(computed, Mark) and computed.event is not None:
        computed.event.wait()  # of the stream
    else:
        computed()


class Aside:
    """Copies are short and are waited for, so they go before what computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if cuda else None  # type: ignore[no-untyped-call]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """What is launched inside, memory taken there included, is done when this ends. It waits for nothing that
        computes: see `mark`."""
        with self.launching():
            try:
                yield
            finally:  # whoever is told of an error may give memory away
                if self._stream is not None:
                    self._stream.synchronize()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """What is launched inside follows what was before, and is not waited for."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def mark(self, blocking: bool = True) -> Mark:
        """Of all that the calling thread has launched so far on its present stream. blocking: who waits for it sleeps;
        else it turns, and hears sooner."""
        if self._stream is None:
            return Mark(None)
        event: Any = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return Mark(event)
