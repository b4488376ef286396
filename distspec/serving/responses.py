"""Bodies of answers in OpenAI's shapes, whole and streamed.

Knows JSON shapes. Does not know HTTP, or how an answer came about. Two fields are our own: `distspec.seed`,
which makes the same answer again, and `usage.distspec`, how speculation went.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from distspec.errors import RequestError
from distspec.serving import logprobs
from distspec.serving.results import Chunk, Completion, PromptReport, Stats
from distspec.serving.tools import Forced

Kind = Literal["completion", "chat"]
DONE = b"data: [DONE]\n\n"

_OBJECTS = {
    "completion": ("cmpl", "text_completion", "text_completion"),
    "chat": ("chatcmpl", "chat.completion", "chat.completion.chunk"),
}
_TYPES = {429: "rate_limit_error", 404: "not_found_error", 503: "service_unavailable_error"}


@dataclass(frozen=True, slots=True)
class Extras:
    """What else a request wants to be told: logprobs of the answer and of its prompt, token ids; and whether its answer
    is calls of tools. spell: see serving.logprobs."""

    spell: logprobs.Spell
    logprobs: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    calls: Forced | None = None

    @property
    def wanted(self) -> bool:
        return self.logprobs or self.prompt_logprobs or self.token_ids


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
        choices = [self._choice(i, item) for i, item in enumerate(completions)]
        body = self._body(_OBJECTS[self.kind][1], choices, completions[0].prompt)
        return body | {"usage": self.usage([item.stats for item in completions])}

    def chunk(self, index: int, chunk: Chunk, *, opens: bool, counts_usage: bool) -> dict[str, Any]:
        """A piece of answer `index`; opens: its first. counts_usage: a usage chunk will follow the answers."""
        choice = self._delta(index, chunk, opens) if self.kind == "chat" else self._choice(index, chunk)
        body = self._body(_OBJECTS[self.kind][2], [choice], chunk.prompt)
        return body | {"usage": None} if counts_usage else body

    def usage_chunk(self, stats: Sequence[Stats]) -> dict[str, Any]:
        return self._body(_OBJECTS[self.kind][2], []) | {"usage": self.usage(stats)}

    def usage(self, stats: Sequence[Stats]) -> dict[str, Any]:
        """Token counts of all answers, in order; a prompt counts once however many choices it has."""
        prompt = sum(item.prompt_tokens for item in stats[:: self.choices])
        completion = sum(item.completion_tokens for item in stats)
        cached = sum(item.cached_tokens or 0 for item in stats[:: self.choices])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "distspec": _speculation(stats),
        }

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

    def _choice(self, index: int, part: Completion | Chunk) -> dict[str, Any]:
        if self.kind == "completion":
            return self._filled(index, {"text": part.text}, part)
        return self._filled(index, {"message": {"role": "assistant", "refusal": None, **self._said(part.text)}}, part)

    def _delta(self, index: int, chunk: Chunk, opens: bool) -> dict[str, Any]:
        said = self._said(chunk.text)
        said["tool_calls"] = [{"index": i, **call} for i, call in enumerate(said.get("tool_calls", ()))]
        delta = ({"role": "assistant"} if opens else {}) | {name: item for name, item in said.items() if item != []}
        return self._filled(index, {"delta": delta}, chunk)

    def _said(self, text: str) -> dict[str, Any]:
        """What a message holds: its text, or calls where these are the whole of it."""
        calls = self.extras.calls.calls(text) if self.extras.calls is not None else None
        return {"content": text} if calls is None else {"content": None, "tool_calls": calls}

    def _filled(self, index: int, content: dict[str, Any], part: Completion | Chunk) -> dict[str, Any]:
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs(part) if self.extras.logprobs else None,
            "finish_reason": self._reason(part.finish_reason),
            "stop_reason": part.stop_reason,
            **({"token_ids": part.token_ids} if self.extras.token_ids else {}),
            **(self._of_prompt(part.prompt) if self.kind == "completion" else {}),
        }

    def _reason(self, reason: str | None) -> str | None:
        return self.extras.calls.reason if self.extras.calls is not None and reason == "stop" else reason

    def _logprobs(self, part: Completion | Chunk) -> dict[str, Any]:
        """Of a piece of a completion, those of an echoed prompt come first."""
        if self.kind == "chat":
            return logprobs.chat(self.extras.spell, part.token_ids, part.logprobs)
        tokens, offsets, told = part.token_ids, part.offsets, part.logprobs
        if part.prompt is None or not part.prompt.offsets:
            return logprobs.completion(self.extras.spell, tokens, offsets, told)
        tokens, offsets = part.prompt.token_ids + tokens, part.prompt.offsets + offsets
        return logprobs.completion(self.extras.spell, tokens, offsets, (None, *part.prompt.logprobs, *told))

    def _of_prompt(self, prompt: PromptReport | None) -> dict[str, Any]:
        """What vLLM tells of a prompt: beside each answer of a completion, once of a chat."""
        found: dict[str, Any] = {}
        if prompt is not None and self.extras.prompt_logprobs:
            found["prompt_logprobs"] = logprobs.prompt(self.extras.spell, prompt.token_ids, prompt.logprobs)
        if prompt is not None and self.extras.token_ids:
            found["prompt_token_ids"] = prompt.token_ids
        return found


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
