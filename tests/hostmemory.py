"""Memory of this machine that processes share as those of one GPU's host share its memory: a window's for a test."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch
from torch import Tensor

from distspec.transfer.base import Computed
from distspec.transfer.window import NoSharedMemory, Region


class HostMemory:
    """Each tensor is an allocation of its own, which outlives its process as long as somebody has it open. A thread is
    the stream on which something is put; who waits, waits."""

    device = torch.device("cpu")
    patience_s = 10.0

    def __init__(self, name: str = "host") -> None:
        self.name = name
        self._stream: ThreadPoolExecutor | None = None
        self._files: dict[int, int] = {}
        self._opened: dict[int, Tensor] = {}

    def empty(self, size_bytes: int) -> Tensor:
        file = os.memfd_create("test")
        os.ftruncate(file, size_bytes)
        made = _mapped(file)
        self._files[made.data_ptr()] = file
        return made

    def like(self, content: Tensor) -> Tensor:
        """A copy that can be shared."""
        made = self.empty(content.nbytes).view(content.dtype).view(content.shape)
        return made.copy_(content)

    def share(self, tensor: Tensor) -> Region:
        file = self._files.get(tensor.data_ptr())
        if file is None:
            raise NoSharedMemory("not of this memory")
        return Region(msgspec.msgpack.encode((os.getpid(), file)), 0)

    def open(self, handle: bytes) -> int:
        pid, file = msgspec.msgpack.decode(handle, type=tuple[int, int])
        try:
            mine = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        except OSError as error:
            raise NoSharedMemory(str(error)) from None
        found = _mapped(mine)
        os.close(mine)
        self._opened[found.data_ptr()] = found
        return found.data_ptr()

    def close(self, address: int) -> None:
        del self._opened[address]

    def copy(self, to: Tensor, address: int) -> None:
        ctypes.memmove(to.data_ptr(), address, to.nbytes)

    def put(self, number: int, to: Tensor, computed: Computed) -> None:
        def run() -> None:
            computed()
            to.fill_(number)

        self._stream = self._stream or ThreadPoolExecutor(1)
        self._stream.submit(run)

    def wait(self, address: int, count: int, stop: Tensor, found: Tensor) -> None:
        number = ctypes.c_int64.from_address(address)
        deadline_s = time.monotonic() + self.patience_s
        while number.value < count and not stop.item() and time.monotonic() < deadline_s:
            time.sleep(1e-4)
        found.fill_(number.value)


def at(address: int, size_bytes: int) -> Tensor:
    """A copy of what lies there, uint8."""
    return torch.frombuffer(bytearray(ctypes.string_at(address, size_bytes)), dtype=torch.uint8)


def _mapped(file: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)
