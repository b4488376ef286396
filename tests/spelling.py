"""A small tokenizer of bytes and some JSON, so that tiny models can write anything."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from functools import cache
from random import Random
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distspec.constraints import Compiler, Grammars, Matcher
from distspec.protocol.values import Constraint
from distspec.sampling.edits import WORD, unpacked

PIECES = ('{"', '":', '",', '"}', "tr", "ue", "true", "nu", "ll", "null", "}}", '",', "],", '"]', "ab", "name", 'e"')
LONGEST = 600
"""Tokens of a text; nothing in the corpus needs more."""
ENDS = ('"', "]", "}", "n", "nu")
END, TURN = "<|endoftext|>", "<|im_start|>"


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, pieces of JSON, the end of the text and one more special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [pair for pair in _merges(PIECES) if pair]
    vocabulary = {piece: id for id, piece in enumerate([*alphabet, *dict.fromkeys(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True), AddedToken(TURN, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)


def _merges(pieces: tuple[str, ...]) -> list[tuple[str, str]]:
    """The first two letters of a piece, then one more at a time."""
    found = [(piece[:end], piece[end]) for piece in pieces for end in range(1, len(piece))]
    return list(dict.fromkeys(found))


def vocab_size() -> int:
    return len(tokenizer())


def end_id() -> int:
    found = tokenizer().eos_token_id
    assert isinstance(found, int)
    return found


def surrogate() -> int:
    """The byte 0xED, with which UTF-8 would spell half a surrogate pair: no text, but xgrammar lets it pass. Models do
    not write that unless they are random."""
    return int(tokenizer().convert_tokens_to_ids("í"))


def encode(text: str) -> list[int]:
    return list(tokenizer().backend_tokenizer.encode(text, add_special_tokens=False).ids)


def decode(ids: Any) -> str:
    return str(tokenizer().backend_tokenizer.decode(list(ids), skip_special_tokens=True))


class Here(Executor):
    """Runs at once, on the thread that asks."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        found: Future[Any] = Future()
        try:
            found.set_result(fn(*args, **kwargs))
        except Exception as error:
            found.set_exception(error)
        return found


LETTERS_END = 95


@cache
def letters() -> Grammars:
    """Of a vocabulary of 96 tokens: the printable letters of ASCII from the space on, and the end."""
    vocabulary = {chr(32 + id): id for id in range(LETTERS_END)} | {END: LETTERS_END}
    backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=END))
    backend.add_special_tokens([AddedToken(END, special=True)])
    found = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)
    return Grammars(lambda: Compiler(found, LETTERS_END + 1, [LETTERS_END]), executor=Here())


@cache
def grammars() -> Grammars:
    """Of this tokenizer; grammars are ready as soon as they are asked for."""
    return Grammars(lambda: Compiler(tokenizer(), vocab_size(), [end_id()]), executor=Here())


def walk(constraint: Constraint, seed: int) -> str:
    """A text by random choices among the tokens that are allowed, up to its end."""
    random = Random(seed)
    matcher = Matcher(grammars().find(constraint).result())
    tokens: list[int] = []
    bits = torch.empty(1, -(-vocab_size() // WORD), dtype=torch.int32)
    while len(tokens) < LONGEST:
        matcher.follow(tokens)
        matcher.fill([()], bits)
        allowed = unpacked(bits, vocab_size())[0].nonzero()[:, 0].tolist()
        allowed = [token for token in allowed if token != surrogate()] or allowed  # Korean begins so too
        # Half of the time what ends something, so that long texts are rare.
        ends = [token for token in allowed if decode([token]).endswith(ENDS)] if random.random() < 0.5 else []
        token = random.choice(ends or allowed)
        if token == end_id():
            return decode(tokens)
        tokens.append(token)
    raise AssertionError(f"no end after {decode(tokens)!r}")
