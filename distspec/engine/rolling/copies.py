"""What goes from the device to the host beside whatever is launched next. Knows tensors and one stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Arrived = Callable[[], Sequence[Tensor]]
"""Waits for tensors, and for nothing that was launched after they were sent, and returns them on the host."""


class Copies:
    """device: of what is sent; from a CPU nothing has to move."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def send(self, *tensors: Tensor) -> Arrived:
        """Once what was launched so far is done. Nobody may write to them any more, as the next replay of a graph
        would."""
        if self._stream is None:
            return lambda: tensors
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        hosts = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in tensors]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for one, host in zip(tensors, hosts, strict=True):
                host.copy_(one, non_blocking=True)
                one.record_stream(self._stream)
            arrived.record()

        def there() -> Sequence[Tensor]:
            arrived.synchronize()
            return hosts

        return there
