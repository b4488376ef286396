"""A link of two, on a process group of gloo or NCCL: tensors one way, in order, and an end to it.

Built from `torch.distributed`'s backends directly: a global group would tie the lives of all workers together.
All use of that module's untyped names is here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from distspec.errors import TransferFailed
from distspec.transfer.meeting import Board

_TAG = 0
_NAP_S = 2e-5
_AWAKE_S = 2e-3
_LINK_S = 30.0
"""For NCCL to link two ends that have met: a process's first time takes seconds."""
_ABORT_S = 10.0
_NEVER = timedelta(days=1)
_APART = -2
"""The priority of streams on which nothing but waits for a peer stands. torch has 32 streams of each priority and deals
them in turns, so that in the end a link would get the one on which rounds are captured or copied (0), or pages are read
and written (-1), and these would wait for its peer."""
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


Pending = Callable[[], None]
"""Returns when the tensor may be used again, or what was received is in it; raises if the link broke."""


class Group(Protocol):
    """Rank 0 sends, rank 1 receives. What is given is there, and memory to receive into is nobody else's; several may
    be under way, which end in order. Whoever waits keeps the tensor alive until then."""

    def send(self, tensor: Tensor) -> Pending:
        """tensor: of any shape and dtype, of the device or the host as the kind says; one that is not contiguous is
        copied."""

    def receive(self, tensor: Tensor) -> Pending:
        """tensor: contiguous, of the shape and dtype that is sent, and filled once Pending has returned."""

    def abort(self) -> None:
        """Break it: the other side sees an error, now or with its timeout."""


def pause(began_s: float) -> float:
    """Let others run, shortly at first, while this thread waits for something since then; how long it has by now."""
    waited_s = time.monotonic() - began_s
    time.sleep(0.0 if waited_s < _AWAKE_S else _NAP_S)
    return waited_s


Found = TypeVar("Found")


def within(timeout_s: float, action: Callable[[], Found]) -> Found:
    """What the action returns or raises. Raises TransferFailed after timeout_s, and leaves it behind on a thread of its
    own: for calls that nothing interrupts and that know no limit themselves."""
    found: Future[Found] = Future()

    def run() -> None:
        try:
            found.set_result(action())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="transfer call", daemon=True).start()
    if not wait_for([found], timeout_s).done:
        raise TransferFailed(f"nothing of the peer for {timeout_s:g} s")
    return found.result()


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

    def send(self, tensor: Tensor) -> Pending:
        sent = tensor.cpu().contiguous()
        work = self._group.send([sent], self._peer, _TAG)

        def wait(kept: Tensor = sent) -> None:
            work.wait()

        return wait

    def receive(self, tensor: Tensor) -> Pending:
        landing = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        work = self._group.recv([landing], self._peer, _TAG)

        def wait() -> None:
            work.wait()
            if landing is not tensor:
                tensor.copy_(landing)

        return wait

    def abort(self) -> None:
        self._group = None  # closes its connections


class Nccl:
    """Over NVLink, InfiniBand or sockets, tensors in device memory, on a stream of its own.

    timeout_s: how long the other side may take for a tensor. Who waits longer is told so and is to abort: a kernel of
    NCCL whose peer died turns for ever.
    """

    def __init__(self, store: Store, rank: int, *, device: torch.device, timeout_s: float) -> None:
        # torch's monitor of a group ends the whole process when it thinks that one link hangs, its watchdog when one
        # failed, and asks the store every second whether to dump its state. Ours have timeouts, and die alone. Of a
        # timeout of its own, or an error, the watchdog tells the store, and then sleeps four times what a dump may
        # take, a minute, in which the group cannot end.
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0")
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        options.is_high_priority_stream = True
        self._device, self._timeout_s = device, timeout_s
        self._store = store  # the group asks it at its first use; the Python half must live that long
        self._peer = 1 - rank
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=_APART)  # type: ignore[no-untyped-call]
        self._group: Any = _dist.ProcessGroupNCCL(store, rank, 2, options)
        self._is_linked = False

    def send(self, tensor: Tensor) -> Pending:
        return self._launch(self._group.send, tensor.contiguous())

    def receive(self, tensor: Tensor) -> Pending:
        return self._launch(self._group.recv, tensor)

    def abort(self) -> None:
        """Its kernels and threads are waited for, but not for ever: a device that does not answer must not keep the
        lane."""
        with suppress(TransferFailed):
            within(_ABORT_S, self._end)

    def _end(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()
        del group  # the last that there is: here its threads are joined

    def _launch(self, operation: Callable[[list[Tensor], int, int], Any], tensor: Tensor) -> Pending:
        begin = partial(self._begin, operation, tensor)
        # The first operation links the two ends, and there NCCL waits without end for a peer that died on its way. The
        # store gives up before: its connection is this thread's again then.
        done = begin() if self._is_linked else within(self._timeout_s + _LINK_S, begin)
        self._is_linked = True

        def wait(kept: Tensor = tensor) -> None:
            began_s = time.monotonic()
            while not done.query():
                if pause(began_s) > self._timeout_s:
                    raise TransferFailed(f"nothing of the peer for {self._timeout_s:g} s")

        return wait

    def _begin(self, operation: Callable[[list[Tensor], int, int], Any], tensor: Tensor) -> Any:
        """The event after it; which device and stream are the present ones is each thread's own."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            operation([tensor], self._peer, _TAG).wait()  # of the stream, not of this thread
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return done
