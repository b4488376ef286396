"""A link through which the destination reads the source's memory, where it lies.

The source shows memory; what it shows outlives the link and every ticket, or is a stage of its own. The destination
maps each allocation once, reads, and lets go of all with the link. So whatever either side still does when a ticket
is closed, nothing of the source is written, and what the destination has read counts only when the source says, after
that, that the ticket was open still.

Knows no ticket, and not by what means one process sees memory of another: that is a `Memory`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from distspec.errors import TransferFailed
from distspec.transfer.aside import Aside
from distspec.transfer.base import Lies

_NONCE_BYTES = 16
_STAGE_BYTES = 32 << 20
"""A piece, but for a giant position."""

Store = Any
"""A `torch.distributed` store, or what has its `set` and `get`."""


class NoSharedMemory(TransferFailed):
    """The two ends do not see each other's memory; both are told."""


class Region(Struct, frozen=True, array_like=True):
    """A tensor of another process: what opens the allocation that it is in, and where it begins there, in bytes."""

    handle: bytes
    offset: int


class Shown(Struct, frozen=True, array_like=True):
    """note: see Lies. Without one the only region is a stage that holds the content itself."""

    regions: tuple[Region, ...]
    note: bytes | None = None


class Memory(Protocol):
    """Of a device, as processes of one host share it. All raise NoSharedMemory where they cannot."""

    device: torch.device

    def empty(self, size_bytes: int) -> Tensor:
        """uint8 [size_bytes], which can be shared."""

    def share(self, tensor: Tensor) -> Region: ...

    def open(self, handle: bytes) -> int:
        """The address here of an allocation of another process, until `close`."""

    def close(self, address: int) -> None: ...

    def copy(self, to: Tensor, address: int) -> None:
        """Fill a contiguous tensor from there, on the present stream."""


class _Probe(Struct, frozen=True):
    region: Region
    nonce: bytes


class Window:
    """rank: 0 shows, 1 reads. make_memory: this side's. Raises NoSharedMemory on both sides if either has none, or the
    destination does not see the source's; memory of another host may answer to the same handle, so it is read."""

    def __init__(self, store: Store, rank: int, make_memory: Callable[[], Memory]) -> None:
        self._stage: Tensor | None = None
        self._opened: dict[bytes, int] = {}
        try:
            (self._look if rank else self._probe)(store, make_memory)
        except BaseException:
            self.abort()
            raise

    def show(self, lies: Lies) -> Shown:
        return Shown(tuple(self._memory.share(tensor) for tensor in lies.memory), lies.note)

    def stage(self, content: Tensor) -> Shown:
        """What lies nowhere that stays; until the next call."""
        found = content.contiguous().flatten().view(torch.uint8)
        if self._stage is None or len(self._stage) < len(found):
            self._stage = self._memory.empty(max(len(found), _STAGE_BYTES))
        with self._aside():
            self._stage[: len(found)] = found
        return Shown((self._memory.share(self._stage),))

    def addresses(self, shown: Shown) -> list[int]:
        """Of what the source shows, in this process."""
        return [self._open(region.handle) + region.offset for region in shown.regions]

    def fetch(self, shown: Shown, to: Tensor) -> None:
        """The content of a stage."""
        [address] = self.addresses(shown)
        with self._aside():
            self._memory.copy(to, address)

    def abort(self) -> None:
        """Nothing is read any more."""
        while self._opened:
            self._memory.close(self._opened.popitem()[1])
        self._stage = None

    def _open(self, handle: bytes) -> int:
        if handle not in self._opened:
            self._opened[handle] = self._memory.open(handle)
        return self._opened[handle]

    def _take(self, memory: Memory) -> None:
        self._memory = memory
        self._aside = Aside(memory.device)

    def _probe(self, store: Store, make_memory: Callable[[], Memory]) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            self._take(make_memory())
            probe = self._memory.empty(_NONCE_BYTES)
            with self._aside():
                probe.copy_(torch.frombuffer(bytearray(nonce), dtype=torch.uint8))
            store.set("probe", msgspec.msgpack.encode(_Probe(self._memory.share(probe), nonce)))
        except NoSharedMemory:
            store.set("probe", b"")
            raise
        if reason := bytes(store.get("seen")).decode():
            raise NoSharedMemory(reason)

    def _look(self, store: Store, make_memory: Callable[[], Memory]) -> None:
        offer = bytes(store.get("probe"))
        if not offer:
            raise NoSharedMemory("the peer has none to share")
        probe = msgspec.msgpack.decode(offer, type=_Probe)
        try:
            self._take(make_memory())
            found = torch.empty(_NONCE_BYTES, dtype=torch.uint8, device=self._memory.device)
            self.fetch(Shown((probe.region,)), found)
            if bytes(found.tolist()) != probe.nonce:
                raise NoSharedMemory("the peer is on another host")
        except NoSharedMemory as error:
            store.set("seen", str(error).encode())
            raise
        store.set("seen", b"")
