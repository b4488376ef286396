"""A link through which the destination reads the source's memory, where it lies.

The source shows memory; what it shows outlives the link and every ticket, or is a stage of its own. The destination
maps each allocation once, reads, and lets go of all with the link. So whatever either side still does when a ticket
is closed, nothing of the source is written. What the destination has read counts if behind that it still finds the
token of what was shown in a word, a number beside that memory: the source changes it before what it showed can become
somebody else's, and no message has to be waited for. The word is read by the stream that read the memory, so both are
waited for at once. There is a word for each of the SEATS that may be shown at a time, so that one ends alone.

What is shown may not be computed yet. Then a stream of the source raises a count, a number before the words, when it
is, and the destination's stream waits for that before it reads: so nothing has to be said, nor launched, between the
end of a computation and the reading. It waits a moment only, since a source that died raises nothing any more, and
tells how far the count had come: what was read before the count said so is nothing, and may be shown again. A count
only grows, so one that is raised late, of what was revoked, says nothing wrong of what is shown now.

Knows no ticket, and not by what means one process sees memory of another: that is a `Memory`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import torch
from msgspec import Struct, structs
from torch import Tensor

from distspec.errors import TransferFailed
from distspec.transfer.aside import Aside, Mark
from distspec.transfer.base import Computed, Lies

SEATS = 3
"""So many are shown at a time at most: a link is busy while one is read, another launched, and a third answered."""
_TOKEN_BITS = 63
"""So many that what somebody else writes to where a word was is never taken for one."""
_STAGE_BYTES = 32 << 20
"""A piece, but for a giant position."""
_WORD_BYTES = 8
_WORD, _COUNT, _STOP = range(3)
"""What a reading keeps on the host: the word it found, the count it found, and whether it is to wait no longer."""

Store = Any
"""A `torch.distributed` store, or what has its `set` and `get`."""


class NoSharedMemory(TransferFailed):
    """The two ends do not see each other's memory; both are told."""


class Region(Struct, frozen=True, array_like=True):
    """A tensor of another process: what opens the allocation that it is in, and where it begins there, in bytes."""

    handle: bytes
    offset: int


class Shown(Struct, frozen=True, array_like=True):
    """It stands while the word of its seat holds `token`. words: the count, and the words behind it. note: see Lies;
    without one the only region is a stage that holds the content itself. count: when it is computed; 0: it is."""

    token: int
    words: Region
    seat: int
    regions: tuple[Region, ...] = ()
    note: bytes | None = None
    count: int = 0


class _Seen(Struct, frozen=True, array_like=True):
    """What the destination says of the source's memory: why it does not see that, or the device that looks."""

    reason: str
    device: str = ""


class Memory(Protocol):
    """Of a device, as processes of one host share it. All raise NoSharedMemory where they cannot."""

    device: torch.device
    name: str
    """The device's, the same in every process."""

    def empty(self, size_bytes: int) -> Tensor:
        """uint8 [size_bytes], which can be shared; of the present stream, where there are streams."""

    def share(self, tensor: Tensor) -> Region: ...

    def open(self, handle: bytes) -> int:
        """The address here of an allocation of another process, until `close`."""

    def close(self, address: int) -> None: ...

    def copy(self, to: Tensor, address: int) -> None:
        """Fill a contiguous tensor, of the device or the host, from there, on the present stream."""

    def put(self, number: int, to: Tensor, computed: Computed) -> None:
        """Write to an int64 [1] of the device once that is computed, after what was put before; waits for nothing. On
        the present stream."""

    def wait(self, address: int, count: int, stop: Tensor, found: Tensor) -> None:
        """Until the number there is `count`, on the present stream; not for long, nor once the host writes to `stop`.
        What it was is written to `found`. Both are int64 [1] of the host."""


class Reading:
    """What a window reads of one thing shown. It is the present one of its seat until it has been waited for."""

    def __init__(self, window: Window, shown: Shown) -> None:
        self._window, self._shown = window, shown
        self._kept = window.kept[shown.seat]
        self._begun: Mark | None = None
        self._ended: Mark | None = None
        self._stopped = False

    def launch(self, read: Callable[[], None]) -> None:
        """read: launches on the present stream, which waits for what is shown, what reads it."""
        with self._window.launching():
            try:
                read()
                self._window.look(self._shown)
            finally:  # where the second breaks, the first is under way
                self._ended = self._window.mark(blocking=False)

    def wait_first(self) -> None:
        """Launch the wait for what is not computed yet."""
        self._kept.zero_()
        if self._shown.count:
            with self._window.launching():
                self._window.wait(self._shown)
                self._begun = self._window.mark(blocking=True)

    def is_done(self) -> bool:
        return self._ended is None or self._ended.is_done()

    def stop(self) -> None:
        """When this returns nothing is read any more, and what was is nothing. From any thread. It waits for no
        computation; what else is being waited for on this stream may have to be shown again."""
        self._stopped = True
        self._window.hurry()
        self._wait()

    def stands(self) -> bool:
        """Waits; whether what was read is what was shown."""
        self._wait()
        return not self._stopped and not self._early() and int(self._kept[_WORD]) == self._shown.token

    def is_early(self) -> bool:
        """Whether it was read before it was computed, once it has been waited for: it may be shown again."""
        return not self._stopped and self._early()

    def _early(self) -> bool:
        return int(self._kept[_COUNT]) < self._shown.count

    def _wait(self) -> None:
        for mark in (self._begun, self._ended):
            if mark is not None:
                mark()


class Window:
    """rank: 0 shows, 1 reads. make_memory: this side's. Raises NoSharedMemory on both sides if either has none, or the
    destination does not see the source's; memory of another host may answer to the same handle, so it is read.

    waits: whether the destination may be shown what is not computed yet. Not where both use one device, since who waits
    there keeps it from who computes. kept: [SEATS, 3], see _WORD."""

    def __init__(self, store: Store, rank: int, make_memory: Callable[[], Memory]) -> None:
        self._words: Tensor | None = None
        self._region: Region | None = None
        self._tokens = [0] * SEATS
        self._count = 0
        self._stage: Tensor | None = None
        self._known: tuple[tuple[Tensor, ...], tuple[Region, ...]] = (), ()
        self._opened: dict[bytes, int] = {}
        self.waits = False
        try:
            (self._look if rank else self._probe)(store, make_memory)
        except BaseException:
            self.abort()
            raise

    # -- the source ----------------------------------------------------------------------------

    def show(self, lies: Lies, seat: int) -> Shown:
        """Until it is revoked. seat: one where nothing else is shown. This launches nothing."""
        return self._shown(seat, self._regions(lies.memory), lies.note)

    def ahead(self, shown: Shown, computed: Computed) -> Shown:
        """The same, which is not computed yet; this does not wait for it."""
        assert self._words is not None
        self._count += 1
        with self._raising.launching():
            self._memory.put(self._count, self._words[:1], computed)
        return structs.replace(shown, count=self._count)

    def stage(self, content: Tensor, seat: int) -> Shown:
        """What lies nowhere that stays, until the next one takes its place."""
        with self._aside():  # memory, too: what another stream let go of, its kernels may be writing still
            found = content.contiguous().flatten().view(torch.uint8)
            if self._stage is None or len(self._stage) < len(found):
                self._stage = self._memory.empty(max(len(found), _STAGE_BYTES))
            self._stage[: len(found)] = found
        return self._shown(seat, self._regions((self._stage,)))

    def revoke(self, seat: int) -> None:
        """What is shown there stands no more when this returns; from any thread, one at a time for each seat."""
        assert self._words is not None
        token = self._tokens[seat] = 1 + secrets.randbits(_TOKEN_BITS - 1)
        with self._aside():
            self._words[1 + seat].fill_(token)

    # -- the destination -----------------------------------------------------------------------

    def addresses(self, shown: Shown) -> list[int]:
        """Of what the source shows, in this process."""
        return [self._open(region.handle) + region.offset for region in shown.regions]

    def read(self, shown: Shown) -> Reading:
        """Begin to: `launch` is to follow, or `stop`."""
        reading = Reading(self, shown)
        reading.wait_first()
        return reading

    def fetch(self, shown: Shown, to: Tensor) -> bool:
        """Fill it with the content of a stage; whether that stood."""
        [address] = self.addresses(shown)
        reading = self.read(shown)
        reading.launch(lambda: self._memory.copy(to, address))
        return reading.stands()

    def look(self, shown: Shown) -> None:
        """Launch a look at the word of what is shown."""
        place = 1 + shown.seat
        self._memory.copy(self.kept[shown.seat, _WORD : _WORD + 1], self._base(shown) + place * _WORD_BYTES)

    def wait(self, shown: Shown) -> None:
        kept = self.kept[shown.seat]
        self._memory.wait(self._base(shown), shown.count, kept[_STOP : _STOP + 1], kept[_COUNT : _COUNT + 1])

    def launching(self) -> Any:
        return self._aside.launching()

    def mark(self, blocking: bool) -> Mark:
        return self._aside.mark(blocking)

    def hurry(self) -> None:
        """Nobody who waits now waits any longer."""
        self.kept[:, _STOP] = 1

    # -- both ----------------------------------------------------------------------------------

    def abort(self) -> None:
        """Nothing that is shown stands, nothing is read any more."""
        if self._opened:
            self.hurry()
            with self._aside():
                pass  # what reads is done
        while self._opened:
            self._memory.close(self._opened.popitem()[1])
        if self._words is not None:
            for seat in range(SEATS):
                self.revoke(seat)
        self._stage, self._known = None, ((), ())

    def _base(self, shown: Shown) -> int:
        return self._open(shown.words.handle) + shown.words.offset

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

    def _shown(self, seat: int, regions: Sequence[Region] = (), note: bytes | None = None) -> Shown:
        assert self._region is not None
        return Shown(self._tokens[seat], self._region, seat, tuple(regions), note)

    def _take(self, memory: Memory) -> None:
        self._memory = memory
        self._aside = Aside(memory.device)
        self.kept = torch.zeros(SEATS, 3, dtype=torch.int64, pin_memory=memory.device.type == "cuda")

    def _probe(self, store: Store, make_memory: Callable[[], Memory]) -> None:
        try:
            self._take(make_memory())
            self._raising = Aside(self._memory.device)
            # Memory of that stream: what it has still to raise when the link is over comes before who has it next.
            with self._raising():
                self._words = self._memory.empty((1 + SEATS) * _WORD_BYTES).view(torch.int64).zero_()
            self._region = self._memory.share(self._words)
            for seat in range(SEATS):
                self.revoke(seat)
            store.set("probe", msgspec.msgpack.encode(self._shown(0)))
        except NoSharedMemory:
            store.set("probe", b"")
            raise
        seen = msgspec.msgpack.decode(bytes(store.get("seen")), type=_Seen)
        if seen.reason:
            raise NoSharedMemory(seen.reason)
        self.waits = seen.device != self._memory.name

    def _look(self, store: Store, make_memory: Callable[[], Memory]) -> None:
        probe = bytes(store.get("probe"))
        if not probe:
            raise NoSharedMemory("the peer has none to share")
        try:
            self._take(make_memory())
            shown = msgspec.msgpack.decode(probe, type=Shown)
            with self._aside():
                self.wait(shown)  # compiled here, not when there is something to read
            reading = self.read(shown)
            reading.launch(lambda: None)
            if not reading.stands():
                raise NoSharedMemory("the peer is on another host")
        except NoSharedMemory as error:
            store.set("seen", msgspec.msgpack.encode(_Seen(str(error))))
            raise
        store.set("seen", msgspec.msgpack.encode(_Seen("", self._memory.name)))
