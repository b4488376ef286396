"""How few tokens a text can be, told without tokenizing it.

Knows the steps of a tokenizer. Does not know requests, or how many tokens are too many.

Tokenizing megabytes takes seconds, and most of what is too long is so by far. A token stands for no more of a text than
it spells, so a text is at least as many tokens as the longest of them fits into it, but for what vanishes on the way.
Where that cannot be told of a tokenizer, it bounds nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
BYTE_LEVEL = {chr(byte): byte for byte in _PRINTED} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted(set(range(0x100)) - set(_PRINTED)))
}
"""How byte-level tokenizers (GPT-2 and its kin) write a byte: one that prints as itself, others from U+0100 on."""

_COMPOSED = 4
"""Bytes of a text for each byte of its NFC, at most; ASCII stays as it is."""
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "NFC", "Prepend")
"""Steps that take nothing of a text away, but for what NFC puts together."""


class Lengths:
    """tokenizer: a `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        spec = json.loads(tokenizer.to_str())
        steps = [*_steps(spec["normalizer"]), *_steps(spec["pre_tokenizer"])]
        is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
        names, added = spec["model"]["vocab"], [token["content"] for token in spec["added_tokens"]]
        self._composed = _COMPOSED if any(step["type"] == "NFC" for step in steps) else 1
        # Where a byte has no token, texts that hold it may vanish.
        self._lost = bytes(byte for name, byte in BYTE_LEVEL.items() if name not in names) if is_byte_level else b""
        self._is_bound = (
            spec["model"]["type"] == "BPE"
            and (is_byte_level or (spec["model"]["byte_fallback"] and all(f"<0x{i:02X}>" in names for i in range(256))))
            and all(map(_keeps, steps))
            and not any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])  # they take white space
        )
        # The mark for a space is longer than one, so that names are no shorter than what they spell.
        sizes = map(len, names) if is_byte_level else (len(name.encode()) for name in names)
        self._longest = max([*sizes, *(len(name.encode()) for name in added)], default=1)

    def fewest(self, text: str) -> int:
        """Tokens of a text, at least."""
        if not self._is_bound:
            return 0
        size = len(text.encode().translate(None, self._lost))
        return -(-size // (self._longest * (1 if text.isascii() else self._composed)))


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """A normalizer or a pre-tokenizer, or all in it if it is a sequence of them."""
    if part is not None and part["type"] == "Sequence":
        for inner in part.get("normalizers", part.get("pretokenizers")):
            yield from _steps(inner)
    elif part is not None:
        yield part


def _keeps(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    if step["type"] == "Replace":
        return len(step["content"].encode()) >= len(step["pattern"].get("String", step["content"] + " ").encode())
    return step["type"] in _KEEPING
