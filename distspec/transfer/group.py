"""A process group of two, on gloo or NCCL: tensors one way, in order, and an end to it.

Built from `torch.distributed`'s backends directly: a global group would tie the lives of all workers together.
All use of that module's untyped names is here.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from distspec.transfer.meeting import Board

_TAG = 0
_dist: Any = dist

Store = Any
"""A `torch.distributed` store, as its process groups want it."""


class Rendezvous(_dist.Store):  # type: ignore[misc]
    """A part of a board, as `torch.distributed` process groups want it."""

    def __init__(self, board: Board, prefix: str, timeout_s: float) -> None:
        super().__init__()
        self._board, self._prefix, self._timeout_s = board, prefix, timeout_s

    def set(self, key: str, value: bytes) -> None:
        self._board.set(f"{self._prefix}/{key}", bytes(value))

    def get(self, key: str) -> bytes:
        return self._board.get(f"{self._prefix}/{key}", self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        for key in keys:
            self._board.get(f"{self._prefix}/{key}", max(0.0, deadline - time.monotonic()))


class Group(Protocol):
    """Rank 0 sends, rank 1 receives. Both return when the tensor may be used again; both raise if it broke."""

    def send(self, tensor: Tensor) -> None: ...

    def receive(self, tensor: Tensor) -> None: ...

    def abort(self) -> None:
        """Break it: the other side sees an error, now or with its timeout."""


class Gloo:
    """Over TCP, tensors in host memory; those of a device are copied through it.

    host: this machine's own address, so that no name is looked up.
    """

    def __init__(self, store: Store, rank: int, *, host: str, timeout_s: float) -> None:
        options = _dist.ProcessGroupGloo._Options()
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        self._peer = 1 - rank
        self._group: Any = _dist.ProcessGroupGloo(store, rank, 2, options)

    def send(self, tensor: Tensor) -> None:
        self._group.send([tensor.cpu().contiguous()], self._peer, _TAG).wait()

    def receive(self, tensor: Tensor) -> None:
        landing = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        self._group.recv([landing], self._peer, _TAG).wait()
        if landing is not tensor:
            tensor.copy_(landing)

    def abort(self) -> None:
        self._group = None  # closes its connections


class Nccl:
    """Over NVLink, InfiniBand or sockets, tensors in device memory, on a stream of its own."""

    def __init__(self, store: Store, rank: int, *, device: torch.device, timeout_s: float) -> None:
        # torch's monitor of a group ends the whole process when it thinks that one link hangs, and asks the store
        # every second whether to dump its state. Ours have timeouts.
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._device, self._timeout_s = device, timeout_s
        self._store = store  # the group asks it at its first use; the Python half must live that long
        self._peer = 1 - rank
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._group = _dist.ProcessGroupNCCL(store, rank, 2, options)

    def send(self, tensor: Tensor) -> None:
        torch.cuda.current_stream(self._device).synchronize()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._group.send([tensor.contiguous()], self._peer, _TAG).wait()
            self._stream.synchronize()

    def receive(self, tensor: Tensor) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._group.recv([tensor], self._peer, _TAG).wait()
            self._stream.synchronize()

    def abort(self) -> None:
        self._group.abort()
