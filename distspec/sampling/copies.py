"""Copies between host and device for which neither waits. Knows tensors and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """values: on the host, not to be written to any more.

    From memory that is pinned anew each time: the allocator keeps it until the copy is done. From any other a copy of
    more than a few kilobytes waits for what the device was asked before.
    """
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def integers(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [n] on the device."""
    return to_device(torch.tensor(values, dtype=torch.int64), device)


def to_host(values: Tensor) -> Tensor:
    """To be read once the device has done what it was asked so far."""
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
