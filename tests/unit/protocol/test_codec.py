"""Frames come back as they were sent, and nothing that is no frame gets through."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distspec.errors import BadMessage
from distspec.protocol.codec import decode_head, decode_messages, encode, pack_logprobs, unpack_logprobs
from distspec.protocol.messages import PROTOCOL_VERSION, Message
from distspec.protocol.values import TokenLogprobs

KINDS: list[type[Any]] = list(get_args(Message))
big = st.integers(-(2**63), 2**64 - 1)


def read(data: bytes) -> list[Any]:
    return decode_messages(decode_head(data)[1])


def messages() -> st.SearchStrategy[Any]:
    st.register_type_strategy(int, big)
    st.register_type_strategy(float, st.floats(allow_nan=False))
    st.register_type_strategy(str, st.text(max_size=8))
    return st.one_of([st.builds(kind, **_fields(kind)) for kind in KINDS])


def _fields(kind: type[Any]) -> dict[str, Any]:
    return {field.name: _value(field.type) for field in msgspec.structs.fields(kind)}


def _value(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.builds(hint, **_fields(hint))
    args = get_args(hint)
    if args and args[-1] is Ellipsis:
        return st.lists(_value(args[0]), max_size=3).map(tuple)
    if args and getattr(hint, "__origin__", None) is tuple:
        return st.tuples(*map(_value, args))
    if args and getattr(hint, "__origin__", None) is not dict:
        return st.one_of([_value(arg) for arg in args])
    return st.none() if hint is type(None) else st.from_type(hint)


@given(st.lists(messages(), max_size=4), big, big, big)
def test_every_message_comes_back(batch: list[Any], term: int, incarnation: int, sequence: int) -> None:
    data = encode(batch, term=term, incarnation=incarnation, sequence=sequence)
    head, body = decode_head(data)
    assert (head.term, head.incarnation, head.sequence) == (term, incarnation, sequence)
    assert decode_messages(body) == batch


@given(st.binary(max_size=200))
def test_noise_is_refused_or_a_frame(data: bytes) -> None:
    with suppress(BadMessage):
        assert isinstance(read(data), list)


@given(st.lists(messages(), min_size=1, max_size=2), st.data())
def test_damaged_frames_are_refused_or_well_typed(batch: list[Any], data: st.DataObject) -> None:
    frame = bytearray(encode(batch, term=1, incarnation=2, sequence=3))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        got = read(bytes(frame))
    except BadMessage:
        return
    assert all(isinstance(message, tuple(KINDS)) for message in got)
    encode(got, term=1, incarnation=2, sequence=3)


@given(st.lists(messages(), min_size=1, max_size=2), st.data())
def test_cut_frames_are_refused(batch: list[Any], data: st.DataObject) -> None:
    frame = encode(batch, term=1, incarnation=2, sequence=3)
    with pytest.raises(BadMessage):
        read(frame[: data.draw(st.integers(0, len(frame) - 1))])


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(BadMessage):
        read(b"\x95\x01\x01\x01\x01" + b"\x91" * 100_000 + b"\x01")


def test_another_version_is_refused_by_name() -> None:
    data = msgspec.msgpack.encode([PROTOCOL_VERSION + 1, 1, 1, 1, ["a message of the future"]])
    with pytest.raises(BadMessage, match=f"version {PROTOCOL_VERSION + 1}, here {PROTOCOL_VERSION}"):
        decode_head(data)


def test_numbers_beyond_64_bits_are_refused_when_encoded() -> None:
    with pytest.raises(BadMessage):
        encode([], term=2**64, incarnation=0, sequence=0)


@given(st.lists(st.builds(TokenLogprobs, **_fields(TokenLogprobs)), max_size=4))
def test_logprobs_of_a_prompt_come_back(told: list[TokenLogprobs]) -> None:
    assert unpack_logprobs(pack_logprobs(told)) == tuple(told)


@pytest.mark.parametrize("noise", [b"\xc1", b"\x91\x01", b"\x91\x92\x01"])
def test_what_is_no_logprobs_is_refused(noise: bytes) -> None:
    with pytest.raises(BadMessage, match="no logprobs"):
        unpack_logprobs(noise)
