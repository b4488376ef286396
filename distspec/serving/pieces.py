"""Outputs of one stream to the chunks of an answer: every token comes with the piece of text that it ends.

Knows the tokenizer, and where an answer stops. Does not know clocks, streams, or what an answer costs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from distspec.protocol.codec import unpack_logprobs
from distspec.protocol.messages import Output
from distspec.protocol.values import TokenLogprobs
from distspec.serving.results import Chunk, PromptReport
from distspec.serving.text import Decoder

T = TypeVar("T")


class Pieces:
    """stop_ids: tokens that were asked to end the answer. count: tokens of it so far, those held back included."""

    def __init__(self, decoder: Decoder, prompt: PromptReport, stop_ids: frozenset[int] = frozenset()) -> None:
        self._decoder = decoder
        self._stop_ids = stop_ids
        self._prompt: PromptReport | None = prompt
        self._base = len(prompt.text)
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self.count = 0

    def push(self, output: Output) -> Chunk | None:
        """What may be given out now, None for nothing; with a finish_reason, the last. A token whose text is held back
        waits with it."""
        text, taken, stopped = self._decoder.push(output.tokens, last=output.finish_reason is not None)
        reason = "stop" if stopped else output.finish_reason
        self.count += taken
        self._tokens += output.tokens[:taken]
        self._logprobs += output.logprobs[:taken]
        if self._prompt is not None and output.prompt_logprobs:
            self._prompt = replace(self._prompt, logprobs=unpack_logprobs(output.prompt_logprobs))
        offsets = tuple(self._base + offset for offset in self._decoder.release(everything=reason is not None))
        if not (text or offsets or reason):
            return None
        prompt, self._prompt = self._prompt, None
        return Chunk(
            text=(prompt.text if prompt is not None else "") + text,
            token_ids=_take(self._tokens, len(offsets)),
            finish_reason=reason,
            stop_reason=self._stop_reason(output) if reason == "stop" else None,
            logprobs=_take(self._logprobs, len(offsets)),
            offsets=offsets,
            prompt=prompt,
        )

    def _stop_reason(self, output: Output) -> int | str | None:
        if self._decoder.stop is not None:
            return self._decoder.stop
        return next((token for token in output.tokens[-1:] if token in self._stop_ids), None)


def _take(held: list[T], count: int) -> tuple[T, ...]:
    taken = tuple(held[:count])
    del held[:count]
    return taken
