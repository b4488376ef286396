"""Logprobs in the shapes of OpenAI's answers, and those of a prompt in vLLM's.

Knows tokens, how each is spelled, and what is told of it. Does not know answers, or how text and tokens came about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from msgspec import structs

from distspec.protocol.values import TokenLogprobs

LEAST = -9999.0
"""What stands for minus infinity, which JSON has not, as in vLLM."""

Spell = Callable[[int], bytes]
"""The text of a token by itself."""


def completion(
    spell: Spell, tokens: Iterable[int], offsets: Iterable[int], told: Iterable[TokenLogprobs | None]
) -> dict[str, Any]:
    """offsets: where in the text each token begins. The first token of a text has no logprobs (None).

    A token that is none of the likeliest comes after them, so one more may be listed than were asked for. Of tokens
    that are spelled alike the likeliest is listed.
    """
    rows = list(zip(tokens, offsets, told, strict=True))
    return {
        "tokens": [_name(spell(token)) for token, _, _ in rows],
        "token_logprobs": [None if said is None else _logprob(said.logprob) for _, _, said in rows],
        "top_logprobs": [None if said is None else _by_name(spell, token, said) for token, _, said in rows],
        "text_offset": [offset for _, offset, _ in rows],
    }


def chat(spell: Spell, tokens: Iterable[int], told: Iterable[TokenLogprobs]) -> dict[str, Any]:
    content = [
        _entry(spell, token, said.logprob) | {"top_logprobs": [_entry(spell, *pair) for pair in said.top]}
        for token, said in zip(tokens, told, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt(spell: Spell, tokens: Sequence[int], told: Iterable[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """By id, of each token of the prompt: itself and the likeliest. told: from the second token on."""
    found: list[dict[str, Any] | None] = [None]
    for token, said in zip(tokens[1:], told, strict=True):
        known = {token: (said.logprob, said.rank)}
        for rank, (other, logprob) in enumerate(said.top, start=1):
            known.setdefault(other, (logprob, rank))
        found.append(
            {
                str(other): {"logprob": _logprob(logprob), "rank": rank, "decoded_token": _name(spell(other))}
                for other, (logprob, rank) in known.items()
            }
        )
    return found


def cut(told: Iterable[TokenLogprobs], most: int) -> Iterator[TokenLogprobs]:
    """With no more of the likeliest tokens than that."""
    return (structs.replace(said, top=said.top[:most]) for said in told)


def _by_name(spell: Spell, token: int, said: TokenLogprobs) -> dict[str, float]:
    found: dict[str, float] = {}
    for other, logprob in (*said.top, (token, said.logprob)):
        found.setdefault(_name(spell(other)), _logprob(logprob))
    return found


def _entry(spell: Spell, token: int, logprob: float) -> dict[str, Any]:
    spelled = spell(token)
    return {"token": _name(spelled), "logprob": _logprob(logprob), "bytes": list(spelled)}


def _name(spelled: bytes) -> str:
    """Bytes that are no text by themselves are written as OpenAI does, \\xe2 and so on."""
    return spelled.decode(errors="backslashreplace")


def _logprob(value: float) -> float:
    return max(value, LEAST)
