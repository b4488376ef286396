"""The OpenAI requests that are served: their fields and ranges, and the first thing wrong with one.

Knows JSON values and what this server allows. Does not know tokens, templates or HTTP. The driver's keyword
arguments pass through here too, so that a field means the same and is refused in the same words everywhere.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from distspec.errors import InvalidField, ModelNotServed, RequestError

ROLES = ("system", "developer", "user", "assistant")
MAX_STOPS = 16
MAX_STOP_IDS = 256
MIN_TEMPERATURE = 1e-5
"""Below this, noise of scale one cannot change which score is highest: greedy."""

_INT64 = 2**63

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "parallel_tool_calls",
    }
)
"""Fields that change no answer: accepted and not looked at."""

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "min_tokens": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "reasoning_effort": (None, "none"),
    "web_search_options": (None,),
}
"""Fields that would change the answer and are not implemented, with the values that would not."""


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SpeculationField(Struct, frozen=True, forbid_unknown_fields=True):
    policy: str | None = None
    num_speculative_tokens: int | None = None


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """What both endpoints share. None: the default. ignore_eos, top_k, min_p, stop_token_ids as in vLLM."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationField | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """prompt: a string, token ids, or a list of either."""

    prompt: Any


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: list[Any]
    max_completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What this server allows. max_streams: prompts x n of one request. max_nodes: speculated tokens at once."""

    model: str
    vocab_size: int
    max_model_len: int
    default_max_tokens: int
    max_n: int
    max_streams: int
    max_nodes: int
    policies: tuple[str, ...]


Request = TypeVar("Request", CompletionRequest, ChatRequest)


def parse(kind: type[Request], body: object, limits: Limits) -> Request:
    """A request whose every field is of the right type and in range.

    Prompts and messages are looked into by `prompts` and by the chat template. Raises InvalidField,
    ModelNotServed or RequestError that name the field.
    """
    if not isinstance(body, Mapping):
        raise RequestError("the body must be a JSON object")
    try:
        request = msgspec.convert(_known(kind, body), kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), body) from None
    _check(request, limits)
    return request


def prompts(value: object, limits: Limits) -> list[str | tuple[int, ...]]:
    """The prompts of a completion request: text, or token ids inside the vocabulary."""
    if isinstance(value, str):
        return [_text("prompt", value)]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise InvalidField("prompt", value, "a string, a list of token ids, or a list of either")
    if not value:
        raise InvalidField("prompt", value, "at least one prompt")
    if isinstance(value[0], int):
        return [_prompt_ids("prompt", value, limits)]
    if len(value) > limits.max_streams:
        raise InvalidField("prompt", len(value), f"at most {limits.max_streams} prompts in one request")
    found: list[str | tuple[int, ...]] = []
    for i, item in enumerate(value):
        if isinstance(item, str):
            found.append(_text(f"prompt[{i}]", item))
        elif isinstance(item, Sequence) and not isinstance(item, bytes):
            found.append(_prompt_ids(f"prompt[{i}]", item, limits))
        else:
            raise InvalidField(f"prompt[{i}]", item, "a string or a list of token ids")
    return found


def check_length(field: str, tokens: int, limits: Limits) -> None:
    """Refuse a prompt that leaves no room for an answer. Raises InvalidField."""
    longest = limits.max_model_len - 1
    if tokens > longest:
        need = f"at most {longest} tokens (max_model_len {limits.max_model_len}, one for the answer)"
        raise InvalidField(field, tokens, need)


def turns(messages: Sequence[object], limits: Limits) -> list[dict[str, str]]:
    """Role and content of each message, content as one string."""
    if not messages:
        raise InvalidField("messages", messages, "at least one message")
    check_length("messages", len(messages), limits)  # each is a token at least
    found = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise InvalidField(where, message, "an object with role and content")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise InvalidField(f"{where}.role", role, f"one of {', '.join(ROLES)}")
        for name, value in message.items():
            if name not in ("role", "content", "name") and value:
                raise InvalidField(f"{where}.{name}", value, "nothing (not supported)")
        # `developer` is OpenAI's newer name for `system`; templates do not know it.
        found.append(
            {"role": "system" if role == "developer" else role, "content": _content(where, message.get("content"))}
        )
    return found


def stops(request: GenerationRequest) -> tuple[str, ...]:
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())


def max_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    """The field that bounds the answer, and its value."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def _known(kind: type[Struct], body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `kind`; what would silently change the answer is refused here."""
    names = kind.__struct_fields__
    known = {}
    for name, value in body.items():
        if name in names:
            known[name] = value
        elif name in UNSUPPORTED:
            neutral = UNSUPPORTED[name]
            if value not in neutral:
                raise InvalidField(name, value, f"{_alternatives(neutral)} (anything else is not supported yet)")
        elif name not in HARMLESS:
            close = difflib.get_close_matches(str(name), names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise RequestError(f"{name}: unknown field{hint}", str(name))
    return known


def _check(request: GenerationRequest, limits: Limits) -> None:
    if request.model is not None and request.model != limits.model:
        raise ModelNotServed(request.model, [limits.model])
    _between("temperature", request.temperature, 0, 2)
    _between("min_p", request.min_p, 0, 1)
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise InvalidField("top_p", request.top_p, "above 0, at most 1")
    _between("top_k", request.top_k, -1, _INT64 - 1)
    _between("seed", request.seed, -_INT64, _INT64 - 1)
    _between("n", request.n, 1, limits.max_n)
    field, count = max_tokens(request)
    _between(field, count, 1, limits.max_model_len)
    if isinstance(request, ChatRequest) and None not in (request.max_tokens, request.max_completion_tokens):
        raise InvalidField("max_tokens", request.max_tokens, "only one of max_tokens and max_completion_tokens")
    if request.stream_options is not None and not request.stream:
        raise InvalidField("stream_options", request.stream_options, "stream=true")
    _check_stops(request, limits)
    _check_speculation(request.speculation, limits)


def _check_stops(request: GenerationRequest, limits: Limits) -> None:
    found = stops(request)
    if len(found) > MAX_STOPS:
        raise InvalidField("stop", found, f"at most {MAX_STOPS} strings")
    for i, stop in enumerate(found):
        field = "stop" if isinstance(request.stop, str) else f"stop[{i}]"
        if not stop:
            raise InvalidField(field, stop, "a string that is not empty")
        _text(field, stop)
    if request.stop_token_ids:
        if len(request.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidField("stop_token_ids", len(request.stop_token_ids), f"at most {MAX_STOP_IDS} ids")
        _ids("stop_token_ids", request.stop_token_ids, limits.vocab_size)


def _check_speculation(choice: SpeculationField | None, limits: Limits) -> None:
    if choice is None:
        return
    if choice.policy is not None and choice.policy not in limits.policies:
        raise InvalidField("speculation.policy", choice.policy, f"one of {', '.join(limits.policies)}")
    _between("speculation.num_speculative_tokens", choice.num_speculative_tokens, 1, limits.max_nodes)


def _between(field: str, value: float | None, low: float, high: float) -> None:
    # Written so that NaN, which compares false with everything, is refused.
    if value is not None and not low <= value <= high:
        raise InvalidField(field, value, f"{low} to {high}")


def _text(field: str, value: str) -> str:
    """JSON can spell half a surrogate pair, which is no text and which tokenizers choke on."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidField(field, value, "valid Unicode (it holds a lone surrogate)") from None
    return value


def _content(where: str, content: Any) -> str:
    field = f"{where}.content"
    if isinstance(content, str):
        return _text(field, content)
    if not isinstance(content, list) or not content:
        raise InvalidField(field, content, "a string or a list of text parts")
    parts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidField(f"{field}[{i}]", part, 'a part {"type": "text", "text": ...}')
        parts.append(_text(f"{field}[{i}].text", part["text"]))
    return "".join(parts)


def _prompt_ids(field: str, value: Sequence[object], limits: Limits) -> tuple[int, ...]:
    check_length(field, len(value), limits)  # before millions of ids are looked at
    return _ids(field, value, limits.vocab_size)


def _ids(field: str, value: Sequence[object], vocab_size: int) -> tuple[int, ...]:
    if not value:
        raise InvalidField(field, value, "at least one token id")
    ids = []
    for i, item in enumerate(value):
        if not isinstance(item, int) or isinstance(item, bool):
            raise InvalidField(f"{field}[{i}]", item, "an integer (ids and text do not mix)")
        if not 0 <= item < vocab_size:
            raise InvalidField(f"{field}[{i}]", item, f"a token id of the vocabulary (0 to {vocab_size - 1})")
        ids.append(item)
    return tuple(ids)


_EXPECTED = re.compile(r"Expected `(?P<need>[^`]*)`, got `(?P<got>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?")


def _invalid(message: str, body: Mapping[str, Any]) -> RequestError:
    """msgspec's message about a type, in the words of our errors."""
    if match := _EXPECTED.fullmatch(message):
        need = match["need"].replace("|", "or").replace("  ", " ")
        return InvalidField(match["path"] or "body", _lookup(body, match["path"] or ""), need)
    for pattern, says in ((_MISSING, "required, and missing"), (_UNKNOWN, "unknown field")):
        if match := pattern.fullmatch(message):
            field = f"{match['path']}.{match['name']}" if match["path"] else match["name"]
            return RequestError(f"{field}: {says}", field)
    what, _, where = message.partition(" - at `$.")
    field = where.rstrip("`")
    return RequestError(f"{field}: {what}" if field else what, field or None)


def _lookup(value: Any, path: str) -> object:
    for key in re.findall(r"[^.\[\]]+", path):
        value = value[int(key)] if isinstance(value, Sequence) else value[key]
    return value


def _alternatives(values: Sequence[object]) -> str:
    return " or ".join("null" if value is None else repr(value) for value in values)
