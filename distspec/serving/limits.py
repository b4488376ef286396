"""What this server allows, and how a value is held to it: the checks that all fields share.

Knows values and the names of the fields that hold them. Does not know any field's meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distspec.errors import InvalidField

MAX_SOUGHT = 1024
"""Characters of a text that is looked for in answers or kept out of them."""

NO_SURROGATE = "valid Unicode (it holds a lone surrogate)"


@dataclass(frozen=True, slots=True)
class Limits:
    """What this server allows. max_streams: prompts x n of one request. max_nodes: speculated tokens at once.
    tool_call_parser: how the model spells calls of tools, as serving.tools names it."""

    model: str
    vocab_size: int
    max_model_len: int
    default_max_tokens: int
    max_n: int
    max_streams: int
    max_nodes: int
    policies: tuple[str, ...]
    tool_call_parser: str | None = None


def check_length(field: str, tokens: int, limits: Limits) -> None:
    """Refuse a prompt that leaves no room for an answer. Raises InvalidField."""
    longest = limits.max_model_len - 1
    if tokens > longest:
        need = f"at most {longest} tokens (max_model_len {limits.max_model_len}, one for the answer)"
        raise InvalidField(field, tokens, need)


def between(field: str, value: float | None, low: float, high: float) -> None:
    """Refuse what is given and out of range. Raises InvalidField."""
    # Written so that NaN, which compares false with everything, is refused.
    if value is not None and not low <= value <= high:
        raise InvalidField(field, value, f"{low} to {high}")


def valid_text(field: str, value: str) -> str:
    """JSON can spell half a surrogate pair, which is no text and which tokenizers choke on. Raises InvalidField."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidField(field, value, NO_SURROGATE) from None
    return value


def of_type(field: str, value: object, kind: type, need: str) -> None:
    """Refuse what is given and of another type; need: the name of that type. Raises InvalidField."""
    if not isinstance(value, kind | None):
        raise InvalidField(field, value, need)


def short_text(field: str, value: str) -> str:
    """A text to look for: not empty, not long. Raises InvalidField."""
    if not value:
        raise InvalidField(field, value, "a string that is not empty")
    if len(value) > MAX_SOUGHT:
        raise InvalidField(field, value, f"at most {MAX_SOUGHT} characters")
    return valid_text(field, value)


def token_ids(field: str, value: Sequence[object], vocab_size: int) -> tuple[int, ...]:
    """Ids inside the vocabulary, at least one. Raises InvalidField."""
    if not value:
        raise InvalidField(field, value, "at least one token id")
    ids = []
    for i, item in enumerate(value):
        if not isinstance(item, int) or isinstance(item, bool):
            raise InvalidField(f"{field}[{i}]", item, "an integer (ids and text do not mix)")
        if not 0 <= item < vocab_size:
            raise InvalidField(f"{field}[{i}]", item, f"a token id of the vocabulary (0 to {vocab_size - 1})")
        ids.append(item)
    return tuple(ids)
