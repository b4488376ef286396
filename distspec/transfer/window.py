"""A link through which the destination reads the source's memory, where it lies.

The source shows memory; what it shows outlives the link and every ticket, or is a stage of its own. The destination
maps each allocation once, reads, and lets go of all with the link. So whatever either side still does when a ticket
is closed, nothing of the source is written. What the destination has read counts if after that it still finds the token
of what was shown in the word, a number beside that memory: the source changes it before what it showed can become
somebody else's, and no message has to be waited for.

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

_TOKEN_BITS = 63
"""So many that what somebody else writes to where a word was is never taken for one."""
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
    """It stands while `word` holds `token`. note: see Lies. Without one the only region is a stage that holds the
    content itself."""

    token: int
    word: Region
    regions: tuple[Region, ...] = ()
    note: bytes | None = None


class Memory(Protocol):
    """Of a device, as processes of one host share it. All raise NoSharedMemory where they cannot."""

    device: torch.device

    def empty(self, size_bytes: int) -> Tensor:
        """uint8 [size_bytes], which can be shared; of the present stream, where there are streams."""

    def share(self, tensor: Tensor) -> Region: ...

    def open(self, handle: bytes) -> int:
        """The address here of an allocation of another process, until `close`."""

    def close(self, address: int) -> None: ...

    def copy(self, to: Tensor, address: int) -> None:
        """Fill a contiguous tensor, of the device or the host, from there, on the present stream."""


class Window:
    """rank: 0 shows, 1 reads. make_memory: this side's. Raises NoSharedMemory on both sides if either has none, or the
    destination does not see the source's; memory of another host may answer to the same handle, so it is read."""

    def __init__(self, store: Store, rank: int, make_memory: Callable[[], Memory]) -> None:
        self._word: Tensor | None = None
        self._word_region: Region | None = None
        self._stage: Tensor | None = None
        self._known: tuple[tuple[Tensor, ...], tuple[Region, ...]] = (), ()
        self._opened: dict[bytes, int] = {}
        try:
            (self._look if rank else self._probe)(store, make_memory)
        except BaseException:
            self.abort()
            raise

    def show(self, lies: Lies) -> Shown:
        """Until the next call, or one of `stage` or `revoke`."""
        return self._shown(self._regions(lies.memory), lies.note)

    def stage(self, content: Tensor) -> Shown:
        """What lies nowhere that stays; likewise."""
        with self._aside():  # memory, too: what another stream let go of, its kernels may be writing still
            found = content.contiguous().flatten().view(torch.uint8)
            if self._stage is None or len(self._stage) < len(found):
                self._stage = self._memory.empty(max(len(found), _STAGE_BYTES))
            self._stage[: len(found)] = found
        return self._shown(self._regions((self._stage,)))

    def revoke(self) -> None:
        """What is shown stands no more when this returns; from any thread."""
        self._write(0)

    def addresses(self, shown: Shown) -> list[int]:
        """Of what the source shows, in this process."""
        return [self._open(region.handle) + region.offset for region in shown.regions]

    def stands(self, shown: Shown) -> bool:
        """Whether what was read before this call is what was shown."""
        found = torch.empty(1, dtype=torch.int64)
        with self._aside():
            self._memory.copy(found, self._open(shown.word.handle) + shown.word.offset)
        return found.item() == shown.token

    def fetch(self, shown: Shown, to: Tensor) -> None:
        """The content of a stage."""
        [address] = self.addresses(shown)
        with self._aside():
            self._memory.copy(to, address)

    def abort(self) -> None:
        """Nothing that is shown stands, nothing is read any more."""
        while self._opened:
            self._memory.close(self._opened.popitem()[1])
        if self._word is not None:
            self.revoke()
        self._stage, self._known = None, ((), ())

    def _open(self, handle: bytes) -> int:
        if handle not in self._opened:
            self._opened[handle] = self._memory.open(handle)
        return self._opened[handle]

    def _regions(self, memory: tuple[Tensor, ...]) -> tuple[Region, ...]:
        """Of memory to show, mostly the same as before: the driver is asked once."""
        before, _ = self._known
        if len(before) != len(memory) or any(one is not other for one, other in zip(before, memory, strict=True)):
            self._known = memory, tuple(self._memory.share(tensor) for tensor in memory)
        return self._known[1]

    def _take(self, memory: Memory) -> None:
        self._memory = memory
        self._aside = Aside(memory.device)

    def _shown(self, regions: tuple[Region, ...] = (), note: bytes | None = None) -> Shown:
        assert self._word_region is not None
        token = 1 + secrets.randbits(_TOKEN_BITS - 1)
        self._write(token)
        return Shown(token, self._word_region, regions, note)

    def _write(self, token: int) -> None:
        assert self._word is not None
        with self._aside():
            self._word.fill_(token)

    def _probe(self, store: Store, make_memory: Callable[[], Memory]) -> None:
        try:
            self._take(make_memory())
            with self._aside():
                self._word = self._memory.empty(8).view(torch.int64)
            self._word_region = self._memory.share(self._word)
            store.set("probe", msgspec.msgpack.encode(self._shown()))
        except NoSharedMemory:
            store.set("probe", b"")
            raise
        if reason := bytes(store.get("seen")).decode():
            raise NoSharedMemory(reason)

    def _look(self, store: Store, make_memory: Callable[[], Memory]) -> None:
        probe = bytes(store.get("probe"))
        if not probe:
            raise NoSharedMemory("the peer has none to share")
        try:
            self._take(make_memory())
            if not self.stands(msgspec.msgpack.decode(probe, type=Shown)):
                raise NoSharedMemory("the peer is on another host")
        except NoSharedMemory as error:
            store.set("seen", str(error).encode())
            raise
        store.set("seen", b"")
