"""A text has no fewer tokens than it is said to have at least, and one that cannot fit is not tokenized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from distspec.errors import InvalidField
from distspec.models import load_tokenizer
from distspec.models.smollm2 import NAME
from distspec.serving import schema
from distspec.serving.lengths import BYTE_LEVEL, Lengths
from distspec.serving.limits import Limits
from distspec.serving.schema import ChatRequest, CompletionRequest
from distspec.serving.service import Service
from distspec.serving.text import Text
from tests.unit.serving.conftest import TableClient
from tests.words import byte_fallback, byte_level

TEXTS = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=40),
    st.text("\u03b9\u1fbe\u0308\u0301\u0340\u0344e\u0327\u1112\u1161\u11ab\u212bK", max_size=40),  # composed by NFC
    st.text("a \n\x00\x06", max_size=200),
    st.builds("".join, st.lists(st.sampled_from(["<|im_end|>", "the", " the", "    ", "quick", "漢"]), max_size=40)),
)


def normalized() -> Any:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def of(
    kind: Any, normalizer: Any = None, pre_tokenizer: Any = None, added: Sequence[AddedToken] = (), **parts: Any
) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = Tokenizer(kind(**parts))
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        if pre_tokenizer is not None:
            tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.add_special_tokens(list(added))
        return tokenizer

    return make


@pytest.mark.parametrize("make", [byte_level, byte_fallback, normalized, lambda: load_tokenizer(NAME)])
def test_no_text_has_fewer_tokens(make: Callable[[], Any]) -> None:
    backend = make().backend_tokenizer
    lengths = Lengths(backend)

    @given(text=TEXTS)
    def check(text: str) -> None:
        assert lengths.fewest(text) <= len(backend.encode(text, add_special_tokens=False).ids)

    check()
    longest = max(map(len, backend.get_vocab()))
    assert lengths.fewest("a" * 40 * longest) >= 10


BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
LEVEL = {name: byte for name, byte in BYTE_LEVEL.items()}


@pytest.mark.parametrize(
    "make",
    [
        of(models.BPE, vocab={"a": 0}, merges=[]),  # drops what it does not know
        of(models.BPE, vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True),
        of(models.BPE, vocab=dict(list(BYTES.items())[:200]), merges=[], byte_fallback=True),
        of(models.BPE, normalizers.Strip(), vocab=BYTES, merges=[], byte_fallback=True),
        of(models.BPE, normalizers.Replace("ab", "a"), vocab=BYTES, merges=[], byte_fallback=True),
        of(models.BPE, None, pre_tokenizers.Split(" ", "removed"), vocab=BYTES, merges=[], byte_fallback=True),
        of(models.BPE, None, pre_tokenizers.Whitespace(), vocab=BYTES, merges=[], byte_fallback=True),
        of(
            models.BPE,
            None,
            pre_tokenizers.ByteLevel(),
            [AddedToken("<end>", rstrip=True)],
            vocab=LEVEL,
            merges=[],
        ),
        of(models.WordPiece, vocab={"a": 0, "?": 1}, unk_token="?"),
    ],
)
def test_a_tokenizer_in_which_text_may_vanish_bounds_nothing(make: Callable[[], Tokenizer]) -> None:
    assert Lengths(make()).fewest("a" * 10000) == 0


class Untried(Text):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        raise AssertionError("a text that cannot fit was tokenized")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "x" * 20000}, "prompt"),
        ({"prompt": [[1], "漢" * 20000]}, "prompt[1]"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user", "content": "x" * 20000}]}, "messages"),
    ],
)
async def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    body: dict[str, Any], field: str, limits: Limits
) -> None:
    service = Service(TableClient(limits.vocab_size), Untried(byte_level()), limits)
    jobs = (
        service.chat_jobs(schema.parse(ChatRequest, body, limits))
        if "messages" in body
        else service.completion_jobs(schema.parse(CompletionRequest, body, limits))
    )
    with pytest.raises(InvalidField, match="at most 199 tokens") as error:
        await jobs
    assert error.value.field == field


async def test_a_long_text_of_which_the_end_is_kept_is_none_too_long(service: Service, limits: Limits) -> None:
    asked = schema.parse(CompletionRequest, {"prompt": "x" * 20000, "truncate_prompt_tokens": 9}, limits)
    [job] = await service.completion_jobs(asked)
    assert len(job.prompt) == 9
