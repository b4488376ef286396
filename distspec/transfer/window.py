"""A link through which the destination reads the source's memory, where it lies.

The source shows memory; what it shows outlives the link and every ticket, or is a stage of its own. The destination
maps each allocation once, reads, and lets go of all with the link. So whatever either side still does when a ticket
is closed, nothing of the source is written. What the destination has read counts if behind that it still finds the
token of what was shown in the word, a number beside that memory: the source changes it before what it showed can become
somebody else's, and no message has to be waited for. The word is read by the stream that read the memory, so both are
waited for at once.

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
    """It stands while `word` holds `token`, which all have in common until one is revoked. note: see Lies. Without one
    the only region is a stage that holds the content itself."""

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
        self._token = 0
        self._stage: Tensor | None = None
        self._known: tuple[tuple[Tensor, ...], tuple[Region, ...]] = (), ()
        self._opened: dict[bytes, int] = {}
        try:
            (self._look if rank else self._probe)(store, make_memory)
        except BaseException:
            self.abort()
            raise

    def show(self, lies: Lies) -> Shown:
        """Until it is revoked. This launches nothing."""
        return self._shown(self._regions(lies.memory), lies.note)

    def stage(self, content: Tensor) -> Shown:
        """What lies nowhere that stays; likewise, but the next one takes its place."""
        with self._aside():  # memory, too: what another stream let go of, its kernels may be writing still
            found = content.contiguous().flatten().view(torch.uint8)
            if self._stage is None or len(self._stage) < len(found):
                self._stage = self._memory.empty(max(len(found), _STAGE_BYTES))
            self._stage[: len(found)] = found
        return self._shown(self._regions((self._stage,)))

    def revoke(self) -> None:
        """What is shown stands no more when this returns; from any thread, while nothing else is being shown."""
        self._renew()

    def addresses(self, shown: Shown) -> list[int]:
        """Of what the source shows, in this process."""
        return [self._open(region.handle) + region.offset for region in shown.regions]

    def look(self, shown: Shown) -> None:
        """Launch, on the present stream, a look at the word, for `stands`."""
        self._memory.copy(self._found, self._open(shown.word.handle) + shown.word.offset)

    def stands(self, shown: Shown) -> bool:
        """Whether what the stream had read before the last look, which is done, is what was shown; once a look."""
        found = self._found.item()
        self._found.zero_()
        return found == shown.token

    def fetch(self, shown: Shown, to: Tensor) -> None:
        """The content of a stage, and a look behind it."""
        [address] = self.addresses(shown)
        with self._aside():
            self._memory.copy(to, address)
            self.look(shown)

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
        self._found = torch.zeros(1, dtype=torch.int64, pin_memory=memory.device.type == "cuda")

    def _shown(self, regions: tuple[Region, ...] = (), note: bytes | None = None) -> Shown:
        assert self._word_region is not None
        return Shown(self._token, self._word_region, regions, note)

    def _renew(self) -> None:
        assert self._word is not None
        self._token = 1 + secrets.randbits(_TOKEN_BITS - 1)
        with self._aside():
            self._word.fill_(self._token)

    def _probe(self, store: Store, make_memory: Callable[[], Memory]) -> None:
        try:
            self._take(make_memory())
            with self._aside():
                self._word = self._memory.empty(8).view(torch.int64)
            self._word_region = self._memory.share(self._word)
            self._renew()
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
            shown = msgspec.msgpack.decode(probe, type=Shown)
            with self._aside():
                self.look(shown)
            if not self.stands(shown):
                raise NoSharedMemory("the peer is on another host")
        except NoSharedMemory as error:
            store.set("seen", str(error).encode())
            raise
        store.set("seen", b"")
