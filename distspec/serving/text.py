"""Text and tokens: encoding, chat templates, incremental decoding, stop strings.

Knows one tokenizer. Does not know requests, streams or the model.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distspec.errors import InvalidField
from distspec.models.tokenizer import stop_ids
from distspec.serving.lengths import BYTE_LEVEL, Lengths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

REPLACEMENT = "\ufffd"
_CHARACTER = 4
"""Bytes of the longest character in UTF-8."""
_WINDOW = 32

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""How tokenizers with byte fallback name a byte."""


class Text:
    """A tokenizer as serving needs it. eos_token_ids: those that the model's own config names."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, eos_token_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # as some are stored, for batches of what they were trained on
        self._backend.no_padding()
        self._lengths = Lengths(self._backend)
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.stop_ids = stop_ids(tokenizer, eos_token_ids)
        self._spelled: dict[int, bytes] = {}

    def fewest(self, text: str) -> int:
        """Tokens of a text at least, as far as that can be told at a glance."""
        return self._lengths.fewest(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Megabytes take seconds, in which other threads go on: of the tokenizer's ways only those for many texts
        release the GIL."""
        [found] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(found.ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return str(self._backend.decode([id for id in ids if id not in self.special_ids], skip_special_tokens=False))

    def shows(self, token: int) -> bool:
        """Whether a token has text: special ones and the padding of an embedding have none."""
        return token not in self.special_ids and self._backend.id_to_token(token) is not None

    def spell(self, token: int) -> bytes:
        """The text of a token by itself, the name of one that is special. Bytes that are no text alone stay so."""
        if token not in self._spelled:
            self._spelled[token] = self._spell(token)
        return self._spelled[token]

    def _spell(self, token: int) -> bytes:
        name = self._backend.id_to_token(token)
        if name is None or token in self.special_ids:
            return (name or "").encode()
        # Beside itself, since some tokenizers drop a space at the beginning of a text.
        twice, once = self.decode([token, token]), self.decode([token])
        if REPLACEMENT not in twice:
            return twice[len(once) :].encode()
        if match := _BYTE.fullmatch(name):
            return bytes([int(match[1], 16)])
        known = [BYTE_LEVEL.get(char) for char in name]
        return bytes(byte for byte in known if byte is not None) if None not in known else once.encode()

    def render(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """A conversation (role and content of each turn) as the chat template has it, which is also told of tools and
        options; up to where the assistant speaks, unless these say otherwise. It holds its own special tokens.

        Raises InvalidField if there is no chat template, or it does not take these turns.
        """
        if not self._tokenizer.chat_template:
            raise InvalidField("messages", "a conversation", "a model with a chat template (or use /v1/completions)")
        try:
            text = self._tokenizer.apply_chat_template(
                turns, tools=list(tools) or None, tokenize=False, **{"add_generation_prompt": True, **(options or {})}
            )
        except Exception as error:  # a template is a program, and fails in its own ways on what it is given
            raise InvalidField("messages", turns, f"what the chat template takes: {error}") from None
        return str(text)


class Detokenizer:
    """Text of a growing token stream, in pieces that never split a character.

    The pieces of `push` and `flush`, joined, equal `Text.decode` of all tokens. Exception: where a tokenizer
    decodes bytes that are not UTF-8 as a run (SentencePiece byte fallback), a character given out stays so.
    Only a short window is decoded again for each token, so the cost per token does not grow.

    A character takes at most four tokens, so U+FFFD at the end is held back for three. In a longer run of
    bytes that are no text the last three U+FFFD may still become a character (one in byte-level vocabularies,
    one a byte with byte fallback), the others not.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._window: list[int] = []
        self._sent = 0
        self._clean = 0
        self.waits = False
        """Whether the last token's text may still change with the next."""

    def push(self, token: int) -> str:
        if not self._text.shows(token):
            return ""
        self._window.append(token)
        decoded = self._text.decode(self._window)
        stable = len(decoded.rstrip(REPLACEMENT))
        waits = len(self._window) - self._clean < _CHARACTER
        piece, self._sent = self._take(decoded, stable if waits else max(stable, len(decoded) - _CHARACTER + 1))
        self.waits = self._sent < len(decoded)
        if stable == len(decoded) > 0:
            # The tokens before the last clean point are not needed to decode what follows; those after it are
            # kept once more as context, for tokenizers that treat the start of a text differently.
            context = self._window[self._clean :]
            if before := self._text.decode(context):
                self._window, self._sent = context, len(before)
                self._clean = len(context)
        elif len(self._window) > _WINDOW:
            self._shorten(decoded)
        return piece

    def flush(self) -> str:
        """What was held back, at the end of the stream."""
        decoded = self._text.decode(self._window)
        piece, self._sent = self._take(decoded, len(decoded))
        return piece

    def _take(self, decoded: str, end: int) -> tuple[str, int]:
        return decoded[self._sent : end], max(self._sent, end)

    def _shorten(self, decoded: str) -> None:
        """Cut a long run of bytes that are no text where both parts decode as they do together."""
        cut = len(self._window) - _WINDOW // 2
        head = self._text.decode(self._window[:cut])
        if self._sent >= len(head) and head + self._text.decode(self._window[cut:]) == decoded:
            self._window = self._window[cut:]
            self._sent -= len(head)
            self._clean = 0


class StopFinder:
    """Finds the first stop string that is completed, and holds back what one may still cut.

    One Knuth-Morris-Pratt automaton per stop: the text held is the longest suffix that begins a stop, and the
    result does not depend on how the text was cut into pieces. Of stops completed by the same character the
    longest counts. include: the text ends after the stop instead of before it, so nothing has to be held back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = [(stop, _failure(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)
        self._include = include
        self._held = ""
        self.found: str | None = None
        """The stop that ended the text."""

    def push(self, piece: str, *, armed: bool = True) -> tuple[str, bool]:
        """(text that no stop can cut any more, whether a stop was found; it is the end of the text then).

        armed: a stop may end in this piece. One that begins in it may end in a later one either way.
        """
        text = self._held + piece
        for end, char in enumerate(piece, start=len(self._held) + 1):
            found = self._advance(char)
            if found and armed:
                self._held, self.found = "", found
                return text[: end if self._include else end - len(found)], True
        certain = len(text) - (0 if self._include else max(self._matched, default=0))
        self._held = text[certain:]
        return text[:certain], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str:
        """The longest stop that `char` completes, or nothing."""
        found = ""
        for i, (stop, failure) in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = failure[matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                found = max(found, stop, key=len)
                matched = failure[-1]
            self._matched[i] = matched
        return found


class Decoder:
    """Tokens of one stream to text, ended by a stop string or a stop token.

    silent: ids of tokens without text, those that end the answer. min_tokens: a stop string counts only if a later
    token than this one completes it. include_stop: the text holds the stop string.
    """

    def __init__(
        self,
        text: Text,
        stops: Sequence[str] = (),
        *,
        silent: Iterable[int] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(text)
        self._finder = StopFinder(stops, include=include_stop)
        self._silent = frozenset(silent)
        self._min_tokens = min_tokens
        self._count = 0
        self._made = self._given = 0  # characters that tokens have brought, and those that were given out
        self._open: list[int] = []  # where tokens begin whose text may still change
        self._ends: deque[tuple[int, int]] = deque()  # where others begin and end

    def push(self, tokens: Sequence[int], *, last: bool = False) -> tuple[str, int, bool]:
        """(text to give out, tokens that count, whether a stop string ended the stream).

        The token that completes a stop counts, those after it do not. last: nothing follows, give out all.
        """
        pieces, taken, stopped = [], 0, False
        for token in tokens:
            if stopped:
                break
            taken += 1
            piece, stopped = self._finder.push(self._shown(token), armed=self._armed)
            pieces.append(piece)
        if last and not stopped:
            piece, stopped = self._finder.push(self._detokenizer.flush(), armed=self._armed)
            pieces += (piece, "" if stopped else self._finder.flush())
        text = "".join(pieces)
        self._given += len(text)
        return text, taken, stopped

    def release(self, *, everything: bool) -> list[int]:
        """Where in the text each token begins, or the character whose bytes it ends: of those that count, were not
        released before, and have given out all their text. everything: at the end, all of them."""
        found = []
        while self._ends and (everything or self._ends[0][1] <= self._given):
            found.append(self._ends.popleft()[0])
        if everything:
            found += self._open
            self._open.clear()
        return [min(start, self._given) for start in found]

    def _shown(self, token: int) -> str:
        """What a token adds to the text, which may be cut."""
        self._count += 1
        self._open.append(self._made)
        shown = "" if token in self._silent else self._detokenizer.push(token)
        self._made += len(shown)
        # Text that comes while bytes are still held back ends what was open before; these bytes are the last token's.
        waits = self._detokenizer.waits
        ended = 0 if waits and not shown else len(self._open) - waits
        self._ends += [(start, self._made) for start in self._open[:ended]]
        del self._open[:ended]
        return shown

    @property
    def stop(self) -> str | None:
        """The stop string that ended the stream, if one has."""
        return self._finder.found

    @property
    def _armed(self) -> bool:
        return self._count > self._min_tokens


def spelled(text: Text, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """A text as it was written, and where in it each token begins: special tokens are there by name, but for those that
    the tokenizer puts before every text."""
    decoder = Decoder(text, ())
    whole, _, _ = decoder.push(tokens, last=True)
    before = text.encode("")
    unwritten = len(before) if tuple(tokens[: len(before)]) == before else 0
    parts, found, taken, length = list[str](), list[int](), 0, 0
    for i, (token, start) in enumerate(zip(tokens, decoder.release(everything=True), strict=True)):
        found.append(start + length)
        if token in text.special_ids and i >= unwritten:
            name = text.spell(token).decode()
            parts += (whole[taken:start], name)
            taken, length = start, length + len(name)
    return "".join((*parts, whole[taken:])), tuple(found)


def _failure(stop: str) -> list[int]:
    """Failure function: for each prefix, the length of its longest proper border."""
    failure = [0] * len(stop)
    border = 0
    for i in range(1, len(stop)):
        while border and stop[border] != stop[i]:
            border = failure[border - 1]
        border += stop[border] == stop[i]
        failure[i] = border
    return failure
