"""Bodies of answers in OpenAI's shapes, whole and streamed.

Knows JSON shapes. Does not know HTTP, or how an answer came about. Two fields are our own: `distspec.seed`,
which makes the same answer again, and `usage.distspec`, how speculation went.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from distspec.errors import RequestError
from distspec.serving import logprobs
from distspec.serving.calls import CallPiece, Plain, Reader, Said
from distspec.serving.results import Chunk, Completion, PromptReport, Stats

Kind = Literal["completion", "chat"]
DONE = b"data: [DONE]\n\n"

_OBJECTS = {
    "completion": ("cmpl", "text_completion", "text_completion"),
    "chat": ("chatcmpl", "chat.completion", "chat.completion.chunk"),
}
_TYPES = {429: "rate_limit_error", 404: "not_found_error", 503: "service_unavailable_error"}


@dataclass(frozen=True, slots=True)
class Extras:
    """What else a request wants to be told: logprobs of the answer and of its prompt, with how many of the likeliest
    tokens (None: no logprobs), token ids. spell: see serving.logprobs. reader: makes what finds calls of tools in the
    text of one answer."""

    spell: logprobs.Spell
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    reader: Callable[[], Reader] = Plain

    @property
    def wanted(self) -> bool:
        return self.logprobs is not None or self.prompt_logprobs is not None or self.token_ids


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all bodies of one answer share. choices: n; the answers of prompt p are p*n .. p*n+n-1."""

    kind: Kind
    model: str
    seed: int
    choices: int
    extras: Extras
    id: str
    created: int

    @classmethod
    def new(cls, kind: Kind, model: str, seed: int, choices: int, extras: Extras) -> Envelope:
        return cls(kind, model, seed, choices, extras, f"{_OBJECTS[kind][0]}-{uuid.uuid4().hex}", int(time.time()))

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        make = self._message if self.kind == "chat" else self._text
        choices = [make(i, item) for i, item in enumerate(completions)]
        body = self._body(_OBJECTS[self.kind][1], choices, completions[0].prompt)
        return body | {"usage": self.usage([item.stats for item in completions])}

    def chunk(self, index: int, chunk: Chunk, said: Said, *, opens: bool) -> dict[str, Any]:
        """A piece of answer `index`, and what it says; opens: its first."""
        choice = self._delta(index, chunk, said, opens) if self.kind == "chat" else self._text(index, chunk)
        return self._body(_OBJECTS[self.kind][2], [choice], chunk.prompt)

    def usage_chunk(self, stats: Sequence[Stats]) -> dict[str, Any]:
        return self._body(_OBJECTS[self.kind][2], []) | {"usage": self.usage(stats)}

    def usage(self, stats: Sequence[Stats]) -> dict[str, Any]:
        """Token counts of all answers, in order; a prompt counts once however many choices it has."""
        prompt = sum(item.prompt_tokens for item in stats[:: self.choices])
        completion = sum(item.completion_tokens for item in stats)
        cached = sum(item.cached_tokens or 0 for item in stats[:: self.choices])
        details = {"prompt_tokens_details": {"cached_tokens": cached}, "distspec": _speculation(stats)}
        return counts(prompt, completion) | details

    def _body(self, kind: str, choices: list[dict[str, Any]], prompt: PromptReport | None = None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "distspec": {"seed": self.seed},
            **(self._of_prompt(prompt) if self.kind == "chat" else {}),
        }

    def _text(self, index: int, part: Completion | Chunk) -> dict[str, Any]:
        return self._filled(index, {"text": part.text}, part)

    def _message(self, index: int, answer: Completion) -> dict[str, Any]:
        reader = self.extras.reader()
        said = read(reader, answer)
        content = said.content or (None if said.calls else "")
        calls = {"tool_calls": [_call(piece) for piece in said.calls]} if said.calls else {}
        message = {"role": "assistant", "content": content, "refusal": None, **calls}
        answer = replace(answer, finish_reason=reader.reason(answer.finish_reason))
        return self._filled(index, {"message": message}, answer)

    def _delta(self, index: int, chunk: Chunk, said: Said, opens: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if opens else {}
        if said.content or self.extras.reader is Plain:
            delta["content"] = said.content
        if said.calls:
            delta["tool_calls"] = [{"index": piece.index, **_call(piece)} for piece in said.calls]
        return self._filled(index, {"delta": delta}, chunk)

    def _filled(self, index: int, content: dict[str, Any], part: Completion | Chunk) -> dict[str, Any]:
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs(part, self.extras.logprobs) if self.extras.logprobs is not None else None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
            **({"token_ids": part.token_ids} if self.extras.token_ids else {}),
            **(self._of_prompt(part.prompt) if self.kind == "completion" else {}),
        }

    def _logprobs(self, part: Completion | Chunk, most: int) -> dict[str, Any]:
        """Of a piece of a completion, those of an echoed prompt come first; of these more may be known, since
        prompt_logprobs is a number of its own."""
        if self.kind == "chat":
            return logprobs.chat(self.extras.spell, part.token_ids, part.logprobs)
        tokens, offsets, told = part.token_ids, part.offsets, part.logprobs
        if part.prompt is None or not part.prompt.offsets:
            return logprobs.completion(self.extras.spell, tokens, offsets, told)
        tokens, offsets = part.prompt.token_ids + tokens, part.prompt.offsets + offsets
        return logprobs.completion(
            self.extras.spell, tokens, offsets, (None, *logprobs.cut(part.prompt.logprobs, most), *told)
        )

    def _of_prompt(self, prompt: PromptReport | None) -> dict[str, Any]:
        """What vLLM tells of a prompt: beside each answer of a completion, once of a chat."""
        found: dict[str, Any] = {}
        most = self.extras.prompt_logprobs
        if prompt is not None and most is not None:
            told = logprobs.cut(prompt.logprobs, most)
            found["prompt_logprobs"] = logprobs.prompt(self.extras.spell, prompt.token_ids, told)
        if prompt is not None and self.extras.token_ids:
            found["prompt_token_ids"] = prompt.token_ids
        return found


def counts(prompt: int, completion: int) -> dict[str, Any]:
    """The part of `usage` that is known while an answer is being made."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def read(reader: Reader, part: Completion | Chunk) -> Said:
    """What a piece of an answer, or all of it, says; what it echoes of the prompt is content."""
    echo = len(part.prompt.text) if part.prompt is not None else 0
    said = reader.push(part.text[echo:], last=part.finish_reason is not None)
    return replace(said, content=part.text[:echo] + said.content)


def models(model: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {"object": "list", "data": [served_model(model, created, max_model_len)]}


def served_model(model: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "distspec",
        "max_model_len": max_model_len,
    }


def error(status: int, message: str, code: str, field: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def request_error(failed: RequestError) -> dict[str, Any]:
    return error(failed.status, failed.message, failed.code, failed.field)


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


def encode(body: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        # An error may quote half a surrogate pair from the request, which UTF-8 cannot spell.
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _call(piece: CallPiece) -> dict[str, Any]:
    """A call of a function, or more of its arguments."""
    if piece.name is None:
        return {"function": {"arguments": piece.arguments}}
    return {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}


def _speculation(stats: Sequence[Stats]) -> dict[str, Any] | None:
    """Sums over the answers that the coordinator counted; None if it counted none."""
    counted = [item for item in stats if item.rounds is not None]
    if not counted:
        return None
    rounds = sum(item.rounds or 0 for item in counted)
    tokens = sum((item.tokens_per_round or 0) * (item.rounds or 0) for item in counted)
    return {
        "policy": counted[0].policy,
        "rounds": rounds,
        "tokens_per_round": round(tokens / rounds, 3) if rounds else None,
        "drafted": sum(item.drafted or 0 for item in counted),
        "accepted": sum(item.accepted or 0 for item in counted),
        **({"synthetic": True} if any(item.synthetic for item in counted) else {}),
    }
