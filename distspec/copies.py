"""Copies between host and device for which neither waits. Knows tensors and nothing else.

A copy from the host's ordinary memory returns at once if it is small; of more than a few ten kilobytes it waits for
what the device was asked before. So values are pinned, anew each time: the allocator keeps the memory until the copy is
done.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_CODES = {torch.int32: "i", torch.int64: "q"}


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """values: on the host, not to be written to any more."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def integers(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """[n] on the device. dtype: int64 or int32."""
    return to_device(_integers(values, dtype), device)


def numbers(whole: Sequence[int], real: Sequence[float], device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [n] and float32 [m] on the device, in one copy."""
    raw = bytearray(array(_CODES[torch.int64], whole))
    raw += array("f", real).tobytes()
    if not raw:
        return torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dtype=torch.float32, device=device)
    both = to_device(torch.frombuffer(raw, dtype=torch.uint8), device)
    return both[: 8 * len(whole)].view(torch.int64), both[8 * len(whole) :].view(torch.float32)


def put(values: Sequence[int], place: Tensor) -> None:
    """Write them to a place on its device. place: int64 or int32 [n]."""
    found = _integers(values, place.dtype)
    place.copy_(found.pin_memory() if place.is_cuda else found, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """To be read once the device has done what it was asked so far."""
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def fetch(*values: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Bring them to the host. What is returned waits for that alone, and for nothing that the device is asked later."""
    found = tuple(map(to_host, values))
    if not values[0].is_cuda:
        return lambda: found
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def wait() -> tuple[Tensor, ...]:
        done.synchronize()
        return found

    return wait


def _integers(values: Sequence[int], dtype: torch.dtype) -> Tensor:
    """By way of an array, which takes a third of the time that torch.tensor takes."""
    return torch.frombuffer(array(_CODES[dtype], values), dtype=dtype) if values else torch.empty(0, dtype=dtype)
