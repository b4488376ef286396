"""Frames: a header and a batch of messages, as MessagePack.

Knows bytes and types. Does not know sockets, peers or what a message means. The header is decoded first and
its layout never changes, so that a peer of another version is refused by name and a stale frame costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw, Struct

from distspec.errors import BadMessage
from distspec.protocol.messages import PROTOCOL_VERSION, Message
from distspec.protocol.values import TokenLogprobs

MAX_FRAME_BYTES = 64 * 2**20
"""What a peer takes in: a larger frame ends its link."""


class Head(Struct, frozen=True, array_like=True, kw_only=True):
    """What stands before the messages of a frame.

    term: the coordinator life that this frame belongs to. incarnation: the peer's life. sequence: counts the
    frames of one link in one direction from 1; 0 marks a frame outside any link (it may only refuse).
    """

    version: int
    term: int
    incarnation: int
    sequence: int


class _Frame(Struct, frozen=True, array_like=True, kw_only=True):
    version: int
    term: int
    incarnation: int
    sequence: int
    messages: Raw


_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(_Frame)
_messages = msgspec.msgpack.Decoder(list[Message])
_logprobs = msgspec.msgpack.Decoder(tuple[TokenLogprobs, ...])


def encode(messages: Sequence[Message], *, term: int, incarnation: int, sequence: int) -> bytes:
    """One frame. Raises BadMessage for what MessagePack cannot hold: a number beyond 64 bits, half a surrogate pair."""
    try:
        body = Raw(_encoder.encode(messages))
        return _encoder.encode(
            _Frame(version=PROTOCOL_VERSION, term=term, incarnation=incarnation, sequence=sequence, messages=body)
        )
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise BadMessage(str(error)) from None


def encode_all(messages: Sequence[Message], *, term: int, incarnation: int, sequence: int) -> list[bytes]:
    """Messages in order, in one frame where that is not too large, else in several; the first is number `sequence`.

    One message that is too large stays so. Raises BadMessage as `encode` does.
    """
    frame = encode(messages, term=term, incarnation=incarnation, sequence=sequence)
    if len(frame) <= MAX_FRAME_BYTES or len(messages) == 1:
        return [frame]
    half = len(messages) // 2
    first = encode_all(messages[:half], term=term, incarnation=incarnation, sequence=sequence)
    return first + encode_all(messages[half:], term=term, incarnation=incarnation, sequence=sequence + len(first))


def decode_head(data: bytes) -> tuple[Head, Raw]:
    """Header of a frame and its messages, still encoded. Raises BadMessage, also for another version."""
    try:
        frame = _frames.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"no frame: {error}") from None
    if frame.version != PROTOCOL_VERSION:
        raise BadMessage(f"protocol version {frame.version}, here {PROTOCOL_VERSION}")
    head = Head(version=frame.version, term=frame.term, incarnation=frame.incarnation, sequence=frame.sequence)
    return head, frame.messages


def decode_messages(body: Raw) -> list[Message]:
    """The messages of a frame. Raises BadMessage."""
    try:
        return _messages.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(f"no message: {error}") from None


def pack_logprobs(told: Sequence[TokenLogprobs]) -> bytes:
    """Those of a whole prompt, which may be megabytes: whoever passes them on never looks inside. Empty of none."""
    return _encoder.encode(told) if told else b""


def unpack_logprobs(packed: bytes) -> tuple[TokenLogprobs, ...]:
    """Raises BadMessage."""
    try:
        return _logprobs.decode(packed) if packed else ()
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadMessage(f"no logprobs: {error}") from None
