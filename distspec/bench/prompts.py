"""What benches ask: chat prompts whose answers are new text, and copy-heavy ones whose answers repeat the prompt.

Knows texts, and how a model reads them. Both kinds matter, since a lookup drafter lives on repetition.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from distspec.errors import InvalidValue

Prompts = Callable[[int], Sequence[int]]
"""The i-th prompt as token ids, for any integer i."""

CHAT = (
    "Why is the sky dark at night although there are so many stars?",
    "Explain to a child how a refrigerator keeps food cold.",
    "What should I think about before I adopt a dog?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "How does a bicycle stay upright while it moves?",
    "Give me three ideas for a birthday party in a small flat.",
    "What is the difference between weather and climate?",
    "Describe the taste of a lemon to somebody who has never had one.",
    "How do I learn to cook when I have only one pan?",
    "Which habits help people to fall asleep sooner?",
    "Explain what a mortgage is in plain words.",
    "Write a polite letter to a neighbour about loud music.",
    "Why do leaves change their colour in autumn?",
    "What makes a good question in a job interview?",
    "Tell me how bread rises.",
    "Suggest a walk for a rainy afternoon in an old town.",
    "What does an operating system do?",
    "How can a team of five people share one small budget?",
    "Write a poem of four lines about an empty train station.",
    "What are the main causes of tiredness during the day?",
)

_NOTE = (
    "The workshop opens at eight on weekdays and at ten on Saturdays. Tools are lent for two days, saws for one. "
    "Whoever brings a tool back late pays one coin per day. Gloves and glasses are free."
)
_CODE = (
    "def total(prices, discount):\n    result = 0\n    for price in prices:\n        result += price * (1 - discount)\n"
    "    return result\n"
)
_LIST = "Anna: 12 apples\nBen: 7 pears\nCleo: 31 plums\nDavid: 4 melons\nEmil: 18 figs\n"

COPY = (
    f"Repeat this text word for word:\n{_NOTE}",
    f"Copy the following list and add up nothing:\n{_LIST}",
    f"Show this function again without changes:\n{_CODE}",
    f"Rename `discount` to `rebate` in this function and show all of it:\n{_CODE}",
    f"Rename `prices` to `costs` in this function and show all of it:\n{_CODE}",
    f"Add a type hint to each parameter of this function and show all of it:\n{_CODE}",
    f"Add a docstring to this function and show all of it:\n{_CODE}",
    f"Write this text again, but the workshop opens at nine on weekdays:\n{_NOTE}",
    f"Write this text again, but saws are lent for three days:\n{_NOTE}",
    f"Write this text again, but without the last sentence:\n{_NOTE}",
    f"Write this text again with a line break after each sentence:\n{_NOTE}",
    f"Quote the sentence about late tools from this text:\n{_NOTE}",
    f"Quote every sentence that has a number in it from this text:\n{_NOTE}",
    f"Sort this list by name from last to first:\n{_LIST}",
    f"Turn this list into lines of the form `fruit: number (name)`:\n{_LIST}",
    f"Turn this list into JSON with the names as keys:\n{_LIST}",
    f"Copy this list, but Ben has 9 pears:\n{_LIST}",
    f"Copy this list and add Fay with 2 kiwis at the end:\n{_LIST}",
    f"Repeat this text three times:\n{_NOTE.partition('. ')[0]}.",
    f"First copy this list, then copy it again:\n{_LIST}",
)


def prompts(kind: str, model: str) -> Prompts:
    """`chat` or `copy`, over and over; or a number: so many random ids each, all different, for any model.

    Raises InvalidValue for another kind, ModelNotFound for texts where the model has no tokenizer.
    """
    texts = {"chat": CHAT, "copy": COPY}.get(kind)
    if texts is not None:
        ids = encoded(model, texts)
        return lambda i: ids[i % len(ids)]
    if not kind.isdecimal() or not int(kind):
        raise InvalidValue("prompts", kind, "chat, copy, or how many random tokens each has")
    from distspec.models import ModelConfig, model_folder

    vocabulary, length = range(ModelConfig.from_pretrained(model_folder(model)).vocab_size), int(kind)
    return lambda i: random.Random(str(i)).choices(vocabulary, k=length)  # of a number it drops the sign


def encoded(model: str, texts: Sequence[str]) -> list[list[int]]:
    """What a user says, by the model's own chat template, as ids; the texts as they are if it has none."""
    from distspec.models import load_tokenizer

    tokenizer: Any = load_tokenizer(model)
    if tokenizer.chat_template is None:
        return [list(tokenizer(text)["input_ids"]) for text in texts]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)) for chat in chats]
