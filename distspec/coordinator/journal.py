"""The coordinator's journal: every event with a digest of what the machine answered, as a stream of MessagePack.

Off unless configured, and mode 0600, because it holds token ids. Bounded: at its limit it stops, and says so.
Knows events and commands as values. Does not know the machine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgpack
import msgspec
from msgspec import Struct

from distspec.coordinator.context import Settings
from distspec.coordinator.events import Command, Event
from distspec.errors import BadMessage

log = logging.getLogger(__name__)
FORMAT = 3
_READ_BYTES = 1 << 16


class Head(Struct, frozen=True, array_like=True):
    """First frame of a journal: what the machine was made with."""

    format: int
    settings: Settings
    term: int


class Entry(Struct, frozen=True, array_like=True):
    """One event at coordinator time now_s, and the digest of the commands it led to."""

    now_s: float
    event: Event
    digest: bytes


def digest(commands: Sequence[Command]) -> bytes:
    """Eight bytes that tell whether two lists of commands are the same."""
    return blake2b(msgspec.msgpack.encode(commands), digest_size=8).digest()


class Journal:
    """Writes one coordinator life. An older journal of that path is kept beside it as `<path>.old`."""

    def __init__(self, path: str | Path, limit_bytes: int, settings: Settings, term: int) -> None:
        self._path = Path(path)
        if self._path.exists():
            os.replace(self._path, self._path.with_name(self._path.name + ".old"))
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        self._encoder = msgspec.msgpack.Encoder()
        self._left = limit_bytes
        self._put(Head(FORMAT, settings, term))

    def write(self, now_s: float, event: Event, commands: Sequence[Command]) -> None:
        self._put(Entry(now_s, event, digest(commands)))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _put(self, frame: Struct) -> None:
        if self._left <= 0:
            return
        data = self._encoder.encode(frame)
        self._left -= len(data)
        if self._left <= 0:
            log.warning("journal %s has reached its limit and stops here; raise coordinator.journal_mb", self._path)
            return
        self._file.write(data)


def read(path: str | Path) -> tuple[Head, Iterator[Entry]]:
    """A journal's head and entries; a last frame that was cut off is left out. Raises BadMessage."""
    frames = _frames(Path(path))
    try:
        head = msgspec.convert(next(frames, None), Head)
    except msgspec.ValidationError as error:
        raise BadMessage(f"{path} is no journal: {error}") from None
    if head.format != FORMAT:
        raise BadMessage(f"{path} has journal format {head.format}, here {FORMAT}")
    return head, _entries(path, frames)


def _entries(path: str | Path, frames: Iterator[Any]) -> Iterator[Entry]:
    for i, frame in enumerate(frames):
        try:
            yield msgspec.convert(frame, Entry)
        except msgspec.ValidationError as error:
            raise BadMessage(f"{path}, entry {i}: {error}") from None


def _frames(path: Path) -> Iterator[Any]:
    # Structs are arrays on disk and strings are text; nothing here needs more than one frame in memory.
    unpacker = msgpack.Unpacker(raw=False, strict_map_key=False)
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            unpacker.feed(data)
            try:
                yield from unpacker
            except (ValueError, msgpack.UnpackException) as error:
                raise BadMessage(f"{path} is damaged: {error}") from None
