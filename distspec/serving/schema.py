"""The OpenAI requests that are served: their fields and ranges, and the first thing wrong with one.

Knows JSON values and what this server allows. Does not know tokens, templates or HTTP. The driver's keyword
arguments pass through here too, so that a field means the same and is refused in the same words everywhere.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from distspec.errors import InvalidField, ModelNotServed, RequestError
from distspec.serving.limits import NO_SURROGATE, Limits, between, short_text, token_ids

MAX_STOPS = 4
MAX_STOP_IDS = 256
MAX_BAD_WORDS = 128
MAX_BIASED = 1024
"""Tokens that logit_bias, and that allowed_token_ids may name: they travel to each worker of a request."""
MAX_LOGPROBS = 20
MAX_BIAS = 100
MAX_NAME = 100
"""Characters of the name of an unknown field that are looked at: what millions resemble is sought for seconds."""
MAX_REPETITION = 1e6
"""Largest repetition_penalty, and its inverse the smallest: at the lowest temperature too, scores stay finite."""
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
        "prompt_cache_options",
        "prompt_cache_retention",
        "prediction",
        "request_id",
    }
)
"""Fields that change no answer: accepted and not looked at."""

UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "top_logprobs": (None, 0),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "reasoning_effort": (None, "none"),
    "web_search_options": (None,),
    "moderation": (None,),
    "verbosity": (None, "medium"),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "documents": (None, []),
    "chat_template": (None,),
    "include_reasoning": (None, True),
    "priority": (None, 0),
    "logits_processors": (None, []),
    "return_tokens_as_token_ids": (None, False),
    "cache_salt": (None,),
    "kv_transfer_params": (None,),
    "vllm_xargs": (None, {}),
    "add_special_tokens": (None,),
    "truncation_side": (None, "left"),
    "prompt_embeds": (None,),
    "mm_processor_kwargs": (None, {}),
}
"""Fields of OpenAI and vLLM that would change the answer and are not implemented (top_logprobs: not in completions),
with the values that would not."""


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """continuous_usage_stats: every chunk has the counts of its choice so far. include_obfuscation changes nothing."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SpeculationField(Struct, frozen=True, forbid_unknown_fields=True):
    policy: str | None = None
    num_speculative_tokens: int | None = None


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """What both endpoints share, named as by OpenAI, else as by vLLM. None: the default.

    logit_bias: by token id, which JSON spells as text. truncate_prompt_tokens: keep the last so many tokens of the
    prompt; -1: as many as leave room for the answer. echo: the answer begins with the prompt, in a chat with the last
    message if it is the assistant's. response_format, structured_outputs: see serving.structure.
    """

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Any, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationField | None = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """prompt: a string, token ids, or a list of either. logprobs: how many of the likeliest tokens are reported."""

    prompt: Any
    logprobs: int | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True):
    """tools, tool_choice, parallel_tool_calls: see serving.tools.

    chat_template_kwargs: what else the chat template is told. add_generation_prompt: it ends with the beginning of the
    assistant's turn; continue_final_message: instead, the answer goes on with the last message.

    logprobs: report those of the answer's tokens, and of the top_logprobs likeliest tokens beside each.
    """

    messages: list[Any]
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


Request = TypeVar("Request", CompletionRequest, ChatRequest)


def parse(kind: type[Request], body: object, limits: Limits) -> Request:
    """A request whose every field is of the right type and in range.

    Prompts and messages are looked into by `prompts` and by the chat template. Raises InvalidField,
    ModelNotServed or RequestError that name the field.
    """
    if not isinstance(body, Mapping):
        raise RequestError("the body must be a JSON object")
    known = _known(kind, body)
    try:
        request = msgspec.convert(known, kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), body) from None
    except UnicodeEncodeError as error:  # of a text where a number belongs
        field = next((name for name, value in known.items() if _holds(value, error.object)), "body")
        raise InvalidField(field, error.object, NO_SURROGATE) from None
    _check(request, limits)
    return request


def stops(request: GenerationRequest) -> tuple[str, ...]:
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())


def max_tokens(request: GenerationRequest) -> tuple[str, int | None]:
    """The field that bounds the answer, and its value."""
    if request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def logprobs(request: GenerationRequest) -> int | None:
    """How many of the likeliest tokens are reported at each token of the answer; None: nothing is."""
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs if isinstance(request, CompletionRequest) else None


def prompt_logprobs(request: GenerationRequest) -> int | None:
    """The same for the prompt: a completion that echoes it has the logprobs of the whole text, beside those that are
    asked for of the prompt itself."""
    of_echo = request.logprobs if request.echo and isinstance(request, CompletionRequest) else None
    asked = [count for count in (request.prompt_logprobs, of_echo) if count is not None]
    return max(asked, default=None)


def biases(request: GenerationRequest) -> tuple[tuple[int, float], ...]:
    """logit_bias by token, in the order of the ids."""
    return tuple(sorted((int(token), value) for token, value in (request.logit_bias or {}).items() if value))


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
            shown = str(name)[:MAX_NAME]
            close = difflib.get_close_matches(shown, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise RequestError(f"{shown}: unknown field{hint}", shown)
    return known


def _check(request: GenerationRequest, limits: Limits) -> None:
    if request.model is not None and request.model != limits.model:
        raise ModelNotServed(request.model, [limits.model])
    between("n", request.n, 1, limits.max_n)
    options = request.stream_options
    if options is not None and not request.stream:
        raise InvalidField("stream_options", options, "stream=true")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise InvalidField("stream_options.continuous_usage_stats", True, "include_usage=true")
    if isinstance(request, ChatRequest) and request.continue_final_message and request.add_generation_prompt:
        raise InvalidField("continue_final_message", True, "add_generation_prompt=false")
    _check_sampling(request)
    _check_lengths(request, limits)
    _check_tokens(request, limits)
    _check_stops(request, limits)
    _check_logprobs(request)
    _check_speculation(request.speculation, limits)


def _check_sampling(request: GenerationRequest) -> None:
    between("temperature", request.temperature, 0, 2)
    between("min_p", request.min_p, 0, 1)
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise InvalidField("top_p", request.top_p, "above 0, at most 1")
    between("top_k", request.top_k, -1, _INT64 - 1)
    between("seed", request.seed, -_INT64, _INT64 - 1)
    between("presence_penalty", request.presence_penalty, -2, 2)
    between("frequency_penalty", request.frequency_penalty, -2, 2)
    penalty = request.repetition_penalty
    if penalty is not None and not 1 / MAX_REPETITION <= penalty <= MAX_REPETITION:
        raise InvalidField("repetition_penalty", penalty, f"above 0 ({1 / MAX_REPETITION:g} to {MAX_REPETITION:g})")


def _check_lengths(request: GenerationRequest, limits: Limits) -> None:
    if None not in (request.max_tokens, request.max_completion_tokens):
        raise InvalidField("max_tokens", request.max_tokens, "only one of max_tokens and max_completion_tokens")
    field, count = max_tokens(request)
    between(field, count, 0 if request.echo and isinstance(request, CompletionRequest) else 1, limits.max_model_len)
    between("min_tokens", request.min_tokens, 0, limits.max_model_len)
    if count is not None and (request.min_tokens or 0) > count:
        raise InvalidField("min_tokens", request.min_tokens, f"at most {field} ({count})")
    keep = request.truncate_prompt_tokens
    if keep is not None and keep != -1 and not 1 <= keep <= limits.max_model_len:
        need = f"1 to {limits.max_model_len}, or -1 for as many as leave room for the answer"
        raise InvalidField("truncate_prompt_tokens", keep, need)


def _check_tokens(request: GenerationRequest, limits: Limits) -> None:
    """What bans and favours single tokens."""
    if request.allowed_token_ids is not None:
        if len(request.allowed_token_ids) > MAX_BIASED:
            raise InvalidField("allowed_token_ids", len(request.allowed_token_ids), f"at most {MAX_BIASED} ids")
        token_ids("allowed_token_ids", request.allowed_token_ids, limits.vocab_size)
    bias = request.logit_bias or {}
    if len(bias) > MAX_BIASED:
        raise InvalidField("logit_bias", len(bias), f"at most {MAX_BIASED} tokens")
    for token, value in bias.items():
        if not _INTEGER.fullmatch(str(token)) or not int(token) < limits.vocab_size:
            raise InvalidField(
                "logit_bias", token, f"token ids of the vocabulary (0 to {limits.vocab_size - 1}) as keys"
            )
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise InvalidField("logit_bias", {token: value}, f"values of {-MAX_BIAS} to {MAX_BIAS}")
    words = request.bad_words or []
    if len(words) > MAX_BAD_WORDS:
        raise InvalidField("bad_words", len(words), f"at most {MAX_BAD_WORDS} words")
    for i, word in enumerate(words):
        short_text(f"bad_words[{i}]", word)


def _check_stops(request: GenerationRequest, limits: Limits) -> None:
    found = stops(request)
    if len(found) > MAX_STOPS:
        raise InvalidField("stop", found, f"at most {MAX_STOPS} strings")
    for i, stop in enumerate(found):
        short_text("stop" if isinstance(request.stop, str) else f"stop[{i}]", stop)
    if request.stop_token_ids:
        if len(request.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidField("stop_token_ids", len(request.stop_token_ids), f"at most {MAX_STOP_IDS} ids")
        token_ids("stop_token_ids", request.stop_token_ids, limits.vocab_size)


def _check_logprobs(request: GenerationRequest) -> None:
    between("prompt_logprobs", request.prompt_logprobs, 0, MAX_LOGPROBS)
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidField("prompt_logprobs", request.prompt_logprobs, "stream=false")
    if isinstance(request, CompletionRequest):
        between("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    if isinstance(request, ChatRequest):
        between("top_logprobs", request.top_logprobs, 0, MAX_LOGPROBS)
        if request.top_logprobs and not request.logprobs:
            raise InvalidField("top_logprobs", request.top_logprobs, "logprobs=true")


def _check_speculation(choice: SpeculationField | None, limits: Limits) -> None:
    if choice is None:
        return
    if choice.policy is not None and choice.policy not in limits.policies:
        raise InvalidField("speculation.policy", choice.policy, f"one of {', '.join(limits.policies)}")
    between("speculation.num_speculative_tokens", choice.num_speculative_tokens, 1, limits.max_nodes)


_INTEGER = re.compile(r"0|[1-9][0-9]{0,9}")
_EXPECTED = re.compile(r"Expected `(?P<need>[^`]*)`, got `(?P<got>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>.*)`)?")


def _invalid(message: str, body: Mapping[str, Any]) -> RequestError:
    """msgspec's message about a type, in the words of our errors."""
    if match := _EXPECTED.fullmatch(message):
        need = match["need"].replace("|", "or").replace("  ", " ")
        path = _known_part(match["path"] or "")
        return InvalidField(path or "body", _lookup(body, path), need)
    for pattern, says in ((_MISSING, "required, and missing"), (_UNKNOWN, "unknown field")):
        if match := pattern.fullmatch(message):
            field = f"{match['path']}.{match['name']}" if match["path"] else match["name"]
            return RequestError(f"{field}: {says}", field)
    what, _, where = message.partition(" - at `$.")
    field = _known_part(where.rstrip("`"))
    return RequestError(f"{field}: {what}" if field else what, field or None)


def _known_part(path: str) -> str:
    """Of a path as msgspec has it, which does not say which key of an object it was."""
    return path.partition("[...]")[0]


def _holds(value: object, text: str) -> bool:
    """Whether a text is somewhere in a JSON value."""
    if isinstance(value, Mapping):
        return any(_holds(item, text) for item in (*value, *value.values()))
    return value == text or (isinstance(value, list | tuple) and any(_holds(item, text) for item in value))


def _lookup(value: Any, path: str) -> object:
    for key in re.findall(r"[^.\[\]]+", path):
        value = value[int(key)] if isinstance(value, Sequence) else value[key]
    return value


def _alternatives(values: Sequence[object]) -> str:
    return " or ".join("null" if value is None else repr(value) for value in values)
