"""Tokenizers: loading one from a checkpoint folder, and whether two models share a vocabulary.

Knows transformers' tokenizer files. Does not know models' weights, chats or requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from distspec.errors import ConfigError, ModelNotFound
from distspec.models.config import DRAFT_FIELD, FIELD, ModelConfig
from distspec.models.fields import read_object

TOKENIZER = "tokenizer.json"
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")
"""Special tokens with which chat models end a turn, whether or not their config lists them."""


def load_tokenizer_folder(folder: Path) -> Any:
    """A transformers PreTrainedTokenizerFast with chat template and end token, exactly as tokenizer.json says.

    AutoTokenizer is not used: it may rebuild the tokenizer from its class and lose steps of the file.
    Raises ModelNotFound without a tokenizer.json, ConfigError for one that cannot be read.
    """
    from transformers import PreTrainedTokenizerFast

    if not (folder / TOKENIZER).is_file():
        raise ModelNotFound(str(folder), [str(folder / TOKENIZER)])
    try:
        return PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # whatever its own parser, transformers and JSON raise
        raise ConfigError(FIELD, f"{folder}: no tokenizer that can be read: {error!r:.200}") from None


def stop_ids(tokenizer: Any, eos_token_ids: Iterable[int] = ()) -> tuple[int, ...]:
    """Tokens that end every answer, in order. eos_token_ids: those that the model's own config names."""
    turns = [id for id, token in tokenizer.added_tokens_decoder.items() if token.content in END_OF_TURN]
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return tuple(sorted({*eos_token_ids, *turns, *own}))


def same_vocabulary(target: Path, drafter: Path) -> None:
    """Refuse a drafter whose token ids mean something else to the target. Both are checkpoint folders.

    Embeddings may be padded to different sizes, as long as the target has a row for each id that the drafter
    can propose. Raises ConfigError that names what differs.
    """
    sizes = [ModelConfig.from_pretrained(*of).vocab_size for of in ((target, FIELD), (drafter, DRAFT_FIELD))]
    ours, theirs = _vocabulary(target, FIELD), _vocabulary(drafter, DRAFT_FIELD)
    if sizes[1] > sizes[0]:
        raise _mismatch(drafter, f"{sizes[1]} token ids, the target has {sizes[0]}")
    if ours is None and theirs is None and sizes[0] == sizes[1]:
        return
    if ours is None or theirs is None:
        without = target if ours is None else drafter
        raise _mismatch(drafter, f"no {TOKENIZER} in {without}, so that ids cannot be compared")
    if ours != theirs:
        token, id = min(set(ours.items()) ^ set(theirs.items()), key=lambda item: item[1])
        raise _mismatch(drafter, f"token {token!r} is {theirs.get(token)}, the target has {ours.get(token)} (id {id})")


def _mismatch(drafter: Path, what: str) -> ConfigError:
    return ConfigError(DRAFT_FIELD, f"{drafter} does not share the target's vocabulary: {what}")


def _vocabulary(folder: Path, field: str) -> dict[str, int] | None:
    """Token to id, added tokens included, or None without a tokenizer.json. field: what names the folder."""
    path = folder / TOKENIZER
    if not path.is_file():
        return None
    tree = read_object(path, field)
    try:
        stored = tree["model"]["vocab"]
        if isinstance(stored, list):  # unigram: [token, score] in the order of ids
            stored = {token: id for id, (token, _) in enumerate(stored)}
        vocabulary: dict[str, int] = stored | {added["content"]: added["id"] for added in tree.get("added_tokens", ())}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(field, f"{path}: no vocabulary of a tokenizer: {error!r:.200}") from None
    return vocabulary
