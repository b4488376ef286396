"""A link between two workers of one host through device memory that both see (CUDA IPC).

The source copies to a stage of its own, the destination from there, over NVLink or within one GPU: NCCL refuses two
ranks on one GPU, and keeps a kernel turning while it waits. The destination opens the stage, not the pages, so whatever
either side still does when a ticket is closed, no page of the other is touched. Two counters in shared host memory say
how many slots of the stage were filled and emptied; they lie behind a file descriptor of the source that has no name,
so whoever dies leaves nothing behind. CUDA keeps the memory of a dead source until its last reader has closed it.

Knows no ticket. All use of the CUDA runtime beside torch is here, since torch counts who reads what it shares, and a
reader that died would hold memory of the source for ever.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from distspec.errors import TransferFailed
from distspec.transfer.group import Pending, Store, pause

_SLOTS = 4
_SLOT_BYTES = 32 << 20
_ALIVE_S = 0.1
_LET_GO_S = 2.0
_FILLED, _EMPTIED, _BROKEN, _CLOSED = range(4)
_NONCE = 32
"""Where it lies: behind the numbers."""
_ANY_DIRECTION = 4
_PEER = 1


class NoSharedMemory(TransferFailed):
    """The two ends do not see each other's device memory; both are told."""


class _Stage(Struct, frozen=True):
    """pid, counters: where the counters are. nonce: what lies behind them, in case that is somebody else."""

    pid: int
    counters: int
    nonce: bytes
    handle: bytes


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class _Runtime:
    """The part of the CUDA runtime that torch does not offer, of the library that torch has loaded."""

    def __init__(self) -> None:
        major = str(torch.version.cuda).partition(".")[0]
        try:
            self._library: Any = ctypes.CDLL(f"libcudart.so.{major}")
        except OSError as error:
            raise NoSharedMemory(str(error)) from None
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def allocate(self, size_bytes: int) -> int:
        found = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(found), ctypes.c_size_t(size_bytes))
        return int(found.value or 0)

    def free(self, memory: int) -> None:
        self._call("cudaFree", ctypes.c_void_p(memory))

    def share(self, memory: int) -> bytes:
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(memory))
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        found = ctypes.c_void_p()
        shared = _Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(found), shared, ctypes.c_uint(_PEER))
        return int(found.value or 0)

    def close(self, memory: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(memory))

    def copy(self, to: int, source: int, size_bytes: int, stream: torch.cuda.Stream) -> None:
        ends = ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(size_bytes)
        self._call("cudaMemcpyAsync", *ends, ctypes.c_int(_ANY_DIRECTION), ctypes.c_void_p(stream.cuda_stream))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            self._library.cudaGetLastError()  # it would be told to whoever asks next
            raise NoSharedMemory(f"{name}: {self._library.cudaGetErrorString(code).decode()}")


class Counters:
    """Numbers that two processes of one host share. Slots that were filled, and emptied, each written by one of them;
    whether the link is broken, by either; whether the destination has let go of the stage."""

    def __init__(self, file: int, nonce: bytes, pid: int) -> None:
        """file: a descriptor, closed here or with this object. Raises NoSharedMemory if the nonce is not there."""
        try:
            self._memory = mmap.mmap(file, _NONCE + len(nonce))
        except (OSError, ValueError) as error:
            raise NoSharedMemory(str(error)) from None
        if self._memory[_NONCE:] != nonce:
            raise NoSharedMemory("the peer is on another host, or in another process namespace")
        self._numbers = memoryview(self._memory)[:_NONCE].cast("q")
        self._pid = pid

    def set(self, which: int, value: int) -> None:
        self._numbers[which] = value

    def wait(self, which: int, value: int, timeout_s: float) -> None:
        """Until the number is at least this. Raises TransferFailed if the peer broke the link or died, or after
        timeout_s."""
        began_s, looked_s = time.monotonic(), 0.0
        while self._numbers[which] < value:
            if self._numbers[_BROKEN] and which != _CLOSED:
                raise TransferFailed("the peer gave the link up")
            waited_s = pause(began_s)
            if waited_s > looked_s + _ALIVE_S:
                looked_s = waited_s
                if not _lives(self._pid):
                    raise TransferFailed("the peer died")
                if waited_s > timeout_s:
                    raise TransferFailed(f"nothing of the peer for {timeout_s:g} s")


def _lives(pid: int) -> bool:
    """One that died and that nobody has asked about is there still, as a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class Ipc:
    """See the module. Raises NoSharedMemory on both sides if either cannot."""

    def __init__(self, store: Store, rank: int, *, device: torch.device, timeout_s: float) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._count = 0
        self._copying: deque[Any] = deque()
        self._stage = 0
        self._is_source = rank == 0
        with torch.cuda.device(device):
            try:
                (self._offer if self._is_source else self._take)(store)
            except Exception:
                self.abort()  # nobody else knows of the stage
                raise

    def send(self, tensor: Tensor) -> Pending:
        """It is in the stage when this returns."""
        whole = tensor.contiguous()
        start, size = whole.data_ptr(), whole.nbytes
        with torch.cuda.device(self._device):
            for offset in range(0, size, _SLOT_BYTES):
                self._counters.wait(_EMPTIED, self._count + 1 - _SLOTS, self._timeout_s)
                part = min(_SLOT_BYTES, size - offset)
                self._runtime.copy(self._slot(self._count), start + offset, part, self._stream)
                self._stream.synchronize()
                self._count += 1
                self._counters.set(_FILLED, self._count)
        return _nothing

    def receive(self, tensor: Tensor) -> Pending:
        start, size = tensor.data_ptr(), tensor.nbytes
        with torch.cuda.device(self._device):
            for offset in range(0, size, _SLOT_BYTES):
                if len(self._copying) == _SLOTS:
                    self._empty()
                self._counters.wait(_FILLED, self._count + 1, self._timeout_s)
                part = min(_SLOT_BYTES, size - offset)
                self._runtime.copy(start + offset, self._slot(self._count), part, self._stream)
                copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record(self._stream)
                self._copying.append(copied)
                self._count += 1
        last = self._count

        def wait(kept: Tensor = tensor) -> None:
            while self._count - len(self._copying) < last:
                self._empty()

        return wait

    def abort(self) -> None:
        """The other side sees it at once, if it waits for something."""
        memory, self._stage = self._stage, 0
        if not memory:
            return
        self._counters.set(_BROKEN, 1)
        with torch.cuda.device(self._device), suppress(NoSharedMemory):
            self._stream.synchronize()
            if self._is_source:
                with suppress(TransferFailed):  # a peer that is dead or frozen: the memory lives until it is gone
                    self._counters.wait(_CLOSED, 1, _LET_GO_S)
                self._runtime.free(memory)
            else:
                self._runtime.close(memory)
        if not self._is_source:
            self._counters.set(_CLOSED, 1)

    def _empty(self) -> None:
        """The oldest slot that is being copied, which the source may then fill again."""
        self._copying.popleft().synchronize()
        self._counters.set(_EMPTIED, self._count - len(self._copying))

    def _slot(self, number: int) -> int:
        return self._stage + number % _SLOTS * _SLOT_BYTES

    def _offer(self, store: Store) -> None:
        file, nonce = os.memfd_create("distspec transfer"), secrets.token_bytes(16)
        try:
            os.write(file, bytes(_NONCE) + nonce)
            self._counters = Counters(file, nonce, os.getpid())
            store.set("stage", msgspec.msgpack.encode(self._allocated(file, nonce, store)))
            pid, _, reason = bytes(store.get("opened")).decode().partition(" ")
            if reason:
                self._counters.set(_CLOSED, 1)
                raise NoSharedMemory(reason)
            self._counters = Counters(file, nonce, int(pid))
        finally:
            os.close(file)

    def _allocated(self, file: int, nonce: bytes, store: Store) -> _Stage:
        """What to offer. Raises NoSharedMemory, which the peer is told."""
        try:
            self._runtime = _Runtime()
            self._stage = self._runtime.allocate(_SLOTS * _SLOT_BYTES)
            return _Stage(os.getpid(), file, nonce, self._runtime.share(self._stage))
        except NoSharedMemory:
            self._counters.set(_CLOSED, 1)
            store.set("stage", b"")
            raise

    def _take(self, store: Store) -> None:
        offer = bytes(store.get("stage"))
        if not offer:
            raise NoSharedMemory("the peer has none to share")
        stage = msgspec.msgpack.decode(offer, type=_Stage)
        try:
            self._runtime, self._counters = _Runtime(), _peers_counters(stage)
            self._stage = self._runtime.open(stage.handle)
        except NoSharedMemory as error:
            store.set("opened", f"0 {error}".encode())
            raise
        store.set("opened", str(os.getpid()).encode())


def _peers_counters(stage: _Stage) -> Counters:
    try:
        file = os.open(f"/proc/{stage.pid}/fd/{stage.counters}", os.O_RDWR)
    except OSError as error:
        raise NoSharedMemory(str(error)) from None
    try:
        return Counters(file, stage.nonce, stage.pid)
    finally:
        os.close(file)


def _nothing() -> None:
    """The stage holds it."""
