"""Which link two workers make: by name, or what both of them can.

Knows the kinds of links. Does not know tickets, hosts or configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from distspec.transfer.group import Gloo, Nccl, Store
from distspec.transfer.ipc import CudaMemory
from distspec.transfer.lane import Link
from distspec.transfer.window import NoSharedMemory, Window

log = logging.getLogger(__name__)


def link(kind: str, store: Store, rank: int, *, device: torch.device, host: str, timeout_s: float) -> Link:
    """kind: `gloo`, `nccl`, `ipc`, or `auto`: shared memory of CUDA where the two see each other's, as on one host,
    else NCCL, and gloo if one of them has no GPU or they have the same one, which NCCL refuses. host: this machine's
    own address. Blocks until the other side has come, at most timeout_s. Raises TransferFailed, or what the kind
    raises."""
    makers: dict[str, Callable[[Store, int], Link]] = {
        "gloo": partial(Gloo, host=host, timeout_s=timeout_s),
        "nccl": partial(Nccl, device=device, timeout_s=timeout_s),
        "ipc": partial(_window, device),
    }
    if kind != "auto":
        return makers[kind](store, rank)
    mine = _gpu(device)
    store.set(f"gpu{rank}", mine.encode())
    theirs = bytes(store.get(f"gpu{1 - rank}")).decode()
    if not mine or not theirs:
        return makers["gloo"](store, rank)
    try:
        return makers["ipc"](store, rank)
    except NoSharedMemory as reason:
        other = "gloo" if mine == theirs else "nccl"
        log.info("KV goes by %s: %s", other, reason)
        return makers[other](store, rank)


def _window(device: torch.device, store: Store, rank: int) -> Window:
    return Window(store, rank, partial(CudaMemory, device))


def _gpu(device: torch.device) -> str:
    """The same for every process that has it; empty without one."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
