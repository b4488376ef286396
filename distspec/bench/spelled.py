"""A vocabulary of any size for models that have none, and the grammar of an endless answer over it.

Knows how tokenizers of byte-level BPE spell tokens. Does not know models or rounds. The tokens are made up: bytes,
words with and without a space before them, numbers, and runs of the signs of JSON, about as often as real ones have
them, so that masks cost what they cost there.
"""

from __future__ import annotations

import json
import string
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distspec.constraints import Compiler, Grammars
from distspec.protocol.values import Constraint

_END = "<|end|>"
_SPACE = "Ġ"
_ITEMS = 150
"""Of the answer, at least: more than any run brings."""

ANSWER = Constraint(
    kind="json_schema",
    text=json.dumps(
        {
            "type": "array",
            "minItems": _ITEMS,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "kind": {"enum": ["book", "film", "song", "play"]},
                    "pages": {"type": "integer"},
                    "rating": {"type": "number"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "in_print": {"type": "boolean"},
                },
                "required": ["name", "kind", "pages", "rating", "tags", "in_print"],
                "additionalProperties": False,
            },
        }
    ),
)


class Vocabulary:
    """begin: the token `[`, with which an ANSWER begins. end: the one with which it would end."""

    def __init__(self, size: int) -> None:
        """size: of the model's vocabulary, more than the 256 bytes."""
        words = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        random = Random(size)
        while len(words) < size - 1:
            words.setdefault(_token(random), len(words))
        self.begin, self.end, self._size = words["["], size - 1, size
        backend = Tokenizer(models.BPE(vocab=words, merges=[]))
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(_END, special=True)])
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_END)

    def grammars(self) -> Grammars:
        return Grammars(lambda: Compiler(self._tokenizer, self._size, [self.end]))


def _token(random: Random) -> str:
    kind = random.random()
    if kind < 0.06:
        return "".join(random.choices('{}[]:,"', k=random.randint(2, 4)))
    if kind < 0.12:
        return "".join(random.choices(string.digits, k=random.randint(2, 5)))
    letters = random.choices(string.ascii_letters if kind > 0.9 else string.ascii_lowercase, k=random.randint(2, 9))
    return (_SPACE if kind > 0.5 else "") + "".join(letters)
