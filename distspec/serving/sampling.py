"""What a request asks for, resolved: the parameters by which its tokens are drawn.

Knows checked requests, the tokenizer and the limits. Does not know streams, nor how a parameter acts.
"""

from __future__ import annotations

from collections.abc import Sequence

from distspec.coordinator.admission import MOST_LOGPROBS
from distspec.errors import InvalidField
from distspec.protocol.values import SamplingParams
from distspec.serving import schema
from distspec.serving.limits import Limits, check_length
from distspec.serving.schema import GenerationRequest
from distspec.serving.text import Text

MAX_BAD_TOKENS = 1024
"""Of all bad words together, in all their spellings."""


def prompt_room(request: GenerationRequest, limits: Limits) -> int | None:
    """How many tokens of a prompt are kept, the last ones; None: all, or none if there are too many.

    -1 leaves room for max_tokens; without one, for as long an answer as others get, in half the context at most.
    """
    keep = request.truncate_prompt_tokens
    if keep != -1:
        return keep
    _, asked = schema.max_tokens(request)
    answer = min(limits.default_max_tokens, limits.max_model_len // 2)
    return max(1, limits.max_model_len - max(1, max(answer, request.min_tokens or 0) if asked is None else asked))


def bad_words(words: Sequence[str], text: Text, limits: Limits) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the words, each as it begins a text and as it follows a space. Raises InvalidField.

    As in vLLM, a leading space of a word itself is not looked at. Unlike there, the spelling after a space is banned
    also where it has another number of tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(words):
        bare = word.lstrip()
        spellings = [text.encode(spelled, add_special_tokens=False) for spelled in (bare, f" {bare}")]
        for spelling in filter(None, spellings):
            if max(spelling) >= limits.vocab_size:
                raise InvalidField(f"bad_words[{i}]", word, "a word that the model's vocabulary can spell")
            found[spelling] = None
    count = sum(map(len, found))
    if count > MAX_BAD_TOKENS:
        raise InvalidField("bad_words", f"{count} tokens", f"at most {MAX_BAD_TOKENS} in all spellings")
    return tuple(found)


def resolve(
    request: GenerationRequest,
    *,
    seed: int,
    field: str,
    prompt_tokens: int,
    bad_words: tuple[tuple[int, ...], ...],
    stop_ids: Sequence[int],
    limits: Limits,
) -> SamplingParams:
    """The parameters of a prompt's first choice, its constraint aside. max_tokens is 1 at least, since workers make no
    fewer; what a request for none wants is the prompt alone (see service.Job).

    field: of the request, that holds the prompt. stop_ids: the model's own. Raises InvalidField.
    """
    temperature = 1.0 if request.temperature is None else request.temperature
    stops = {*(request.stop_token_ids or ()), *(() if request.ignore_eos else stop_ids)}
    params = SamplingParams(
        max_tokens=max(1, _max_tokens(request, field, prompt_tokens, limits)),
        seed=seed,
        temperature=0.0 if temperature < schema.MIN_TEMPERATURE else temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        min_p=request.min_p or 0.0,
        stop_token_ids=tuple(sorted(stops)),
        prompt_tokens=prompt_tokens,
        min_tokens=request.min_tokens or 0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=schema.biases(request),
        allowed_token_ids=tuple(sorted(set(request.allowed_token_ids or ()))),
        bad_words=bad_words,
        logprobs=schema.logprobs(request),
        prompt_logprobs=schema.prompt_logprobs(request),
    )
    _check_support(params, limits.vocab_size)
    told = prompt_tokens * (1 + (params.prompt_logprobs or 0))
    if params.prompt_logprobs is not None and told > MOST_LOGPROBS:
        name = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"  # of an echo
        need = f"less, {MOST_LOGPROBS} logprobs in all; the prompt has {prompt_tokens} tokens"
        raise InvalidField(name, params.prompt_logprobs, need)
    return params


def _max_tokens(request: GenerationRequest, field: str, length: int, limits: Limits) -> int:
    if length == 0:
        raise InvalidField(field, "", "at least one token")
    check_length(field, length, limits)
    room = limits.max_model_len - length
    least = request.min_tokens or 0
    name, asked = schema.max_tokens(request)
    if asked is None:
        name, asked = "min_tokens", max(least, min(limits.default_max_tokens, room))
    if asked > room:
        need = f"at most {room} (max_model_len {limits.max_model_len}, the prompt has {length} tokens)"
        raise InvalidField(name, asked, need)
    return asked


def _check_support(params: SamplingParams, vocab_size: int) -> None:
    """Refuse what could leave no token to draw: one must be allowed that neither ends a bad word nor is held back."""
    banned = {word[-1] for word in params.bad_words} | set(params.stop_token_ids if params.min_tokens else ())
    if params.allowed_token_ids:
        if not set(params.allowed_token_ids) - banned:
            need = "a token beside those that bad_words and min_tokens forbid"
            raise InvalidField("allowed_token_ids", params.allowed_token_ids, need)
    elif len(banned) >= vocab_size:
        raise InvalidField("bad_words", f"{len(params.bad_words)} spellings", "a token of the vocabulary left to draw")
