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
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:  # whoever is told of an error may give memory away
                self._stream.synchronize()

    def mark(self) -> Computed:
        """Of all that the calling thread has launched so far."""
        if self._stream is None:
            return lambda: None
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return lambda: event.synchronize()
