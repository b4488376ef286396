"""The processor chain by the book: one row, one token after the other, in plain Python over the whole text.

Shares no code with the package's own. Numbers are float32 at every step, since sums and products must round alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from random import Random

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from distspec.protocol.values import Constraint, SamplingParams
from tests.schemas import thing

END = 95
"""What ends an answer that has a constraint; the token t before it is chr(32 + t)."""
_ANY = [*("".join(some) for length in range(4) for some in product("abc", repeat=length))]
WORDS: dict[Constraint, list[str]] = {
    Constraint(kind="regex", text="(ab|c){1,4}"): [
        "".join(some) for length in range(1, 5) for some in product(("ab", "c"), repeat=length)
    ],
    Constraint(kind="regex", text=r"[a-c]{0,3}</t>\{\"x\":[01]{2}\}"): [
        f'{free}</t>{{"x":{x}{y}}}' for free, x, y in product(_ANY, "01", "01")
    ],
    Constraint(
        kind="json_schema",
        text=json.dumps(thing(True, ["b"], a={"enum": [1, 22, 333]}, b={"type": "boolean"}, c={"const": "x"})),
    ): [
        "{" + ",".join(part for part in parts if part) + "}"
        for parts in product(('"a":1', '"a":22', '"a":333', ""), ('"b":true', '"b":false'), ('"c":"x"', ""))
    ],
}
"""All that constraints allow."""

_EDITS = (
    *("constraint", "allowed_token_ids", "bad_words", "min_tokens", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def edited(logits: Tensor, text: Sequence[int], params: SamplingParams) -> Tensor:
    """float32 [vocab] of the token that follows `text`, prompt included, before temperature."""
    if all(getattr(params, name) == getattr(SamplingParams(max_tokens=1), name) for name in _EDITS):
        return logits
    output = list(text[params.prompt_tokens :])
    repetition, presence, frequency = (
        np.float32(value) for value in (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    )
    scores = list(logits.cpu().numpy())
    forbidden = _forbidden(len(scores), output, params)
    for token in range(len(scores)):
        if token in forbidden:
            scores[token] = -np.float32(np.inf)
        for biased, value in params.logit_bias:
            if biased == token:
                scores[token] = scores[token] + np.float32(value)
        if token in text:
            scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
        if token in output:
            scores[token] = scores[token] - frequency * np.float32(output.count(token)) - presence
    return torch.tensor(np.array(scores), device=logits.device)


def _forbidden(vocab: int, output: list[int], params: SamplingParams) -> set[int]:
    """Bans that would leave nothing of what is allowed are not followed."""
    every = set(range(vocab))
    may = every if params.constraint is None else _may_follow(output, WORDS[params.constraint])
    allowed = may & set(params.allowed_token_ids) or may
    banned = set()
    for *before, last in params.bad_words:
        if len(output) >= len(before) and output[len(output) - len(before) :] == before:
            banned.add(last)
    if len(output) < params.min_tokens:
        banned |= set(params.stop_token_ids)
    return every - (allowed - banned or allowed)


def _may_follow(output: list[int], words: list[str]) -> set[int]:
    text = "".join(chr(32 + token) for token in output)
    found = {ord(word[len(text)]) - 32 for word in words if len(word) > len(text) and word.startswith(text)}
    return found | {END} if text in words else found or {END}


def wish(random: Random, params: SamplingParams, vocab: int) -> SamplingParams:
    """These parameters with some edits, any number of them, of tokens of this vocabulary."""

    def some(most: int) -> tuple[int, ...]:
        return tuple(random.sample(range(vocab), random.randint(1, most)))

    edits: dict[str, object] = {
        "allowed_token_ids": some(vocab // 2),
        "bad_words": tuple((*some(2), token) if random.random() < 0.5 else (token,) for token in some(vocab // 4)),
        "min_tokens": random.randint(1, params.max_tokens),
        "logit_bias": tuple((token, random.uniform(-5, 5)) for token in some(vocab // 3)),
        "repetition_penalty": random.uniform(0.5, 2),
        "presence_penalty": random.uniform(-2, 2),
        "frequency_penalty": random.uniform(-2, 2),
    }
    # Penalties are what depends on paths, and a row that may be little depends on little.
    odds = {name: 0.2 if name == "allowed_token_ids" else 0.6 if name.endswith("penalty") else 0.4 for name in edits}
    return replace(params, **{name: value for name, value in edits.items() if random.random() < odds[name]})
