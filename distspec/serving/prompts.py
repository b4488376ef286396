"""What the model is to go on from: texts, token ids, or the turns of a chat.

Knows the JSON of `prompt` and `messages`, and what a request tells its template. Does not know tokenizers or templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distspec.errors import InvalidField
from distspec.serving.limits import Limits, check_length, token_ids, valid_text
from distspec.serving.schema import ChatRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED = frozenset(
    {
        *("self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs"),
    }
)
"""What rendering a template takes for itself (`apply_chat_template` of transformers)."""
_OF_ROLE = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}
"""What a message of a role may hold beside its content and the name of who speaks; the template is told of it."""


def prompts(value: object, limits: Limits, keep: int | None = None) -> list[str | tuple[int, ...]]:
    """The prompts of a completion request: text, or token ids inside the vocabulary, of which the last `keep` are kept.

    Raises InvalidField.
    """
    if isinstance(value, str):
        return [valid_text("prompt", value)]
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise InvalidField("prompt", value, "a string, a list of token ids, or a list of either")
    if not value:
        raise InvalidField("prompt", value, "at least one prompt")
    if isinstance(value[0], int):
        return [_prompt_ids("prompt", value, limits, keep)]
    if len(value) > limits.max_streams:
        raise InvalidField("prompt", len(value), f"at most {limits.max_streams} prompts in one request")
    found: list[str | tuple[int, ...]] = []
    for i, item in enumerate(value):
        if isinstance(item, str):
            found.append(valid_text(f"prompt[{i}]", item))
        elif isinstance(item, Sequence) and not isinstance(item, bytes):
            found.append(_prompt_ids(f"prompt[{i}]", item, limits, keep))
        else:
            raise InvalidField(f"prompt[{i}]", item, "a string or a list of token ids")
    return found


def turns(messages: Sequence[object], limits: Limits) -> list[dict[str, Any]]:
    """Role and content of each message, content as one string, its name, and calls of tools. Raises InvalidField."""
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
        own = {name: message[name] for name in ("name", *_OF_ROLE.get(role, ())) if message.get(name)}
        for name, value in message.items():
            if name not in ("role", "content", *own) and value:
                raise InvalidField(f"{where}.{name}", value, "nothing (not supported)")
        if "tool_calls" in own:
            own["tool_calls"] = _calls(f"{where}.tool_calls", own["tool_calls"])
        for name in own.keys() - {"tool_calls"}:
            if not isinstance(own[name], str):
                raise InvalidField(f"{where}.{name}", own[name], "a string")
        for name, value in own.items():
            valid_text(f"{where}.{name}", json.dumps(value, ensure_ascii=False))
        is_silent = "tool_calls" in own and message.get("content") in (None, "")
        content = "" if is_silent else _content(where, message.get("content"))
        # `developer` is OpenAI's newer name for `system`; templates do not know it.
        found.append({"role": "system" if role == "developer" else role, "content": content, **own})
    return found


def template_options(request: ChatRequest) -> dict[str, Any]:
    """What the chat template is told beside turns and tools. Raises InvalidField."""
    found = request.chat_template_kwargs or {}
    for name in found:
        if name in RESERVED:
            raise InvalidField(f"chat_template_kwargs.{name}", found[name], "nothing; it is set from elsewhere")
    valid_text("chat_template_kwargs", json.dumps(found, ensure_ascii=False))
    continues = bool(request.continue_final_message)
    begins = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    return {**found, "add_generation_prompt": begins, "continue_final_message": continues}


def _calls(field: str, calls: object) -> list[dict[str, Any]]:
    """As templates have them, with arguments as an object instead of its JSON."""
    if not isinstance(calls, list):
        raise InvalidField(field, calls, "a list of calls")
    found = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidField(f"{field}[{i}]", call, "a call of a function by its name")
        try:
            arguments = json.loads(valid_text(f"{field}[{i}].function.arguments", function.get("arguments") or "{}"))
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise InvalidField(f"{field}[{i}].function.arguments", function.get("arguments"), "JSON") from None
        found.append({**call, "function": {"name": function["name"], "arguments": arguments}})
    return found


def _content(where: str, content: Any) -> str:
    field = f"{where}.content"
    if isinstance(content, str):
        return valid_text(field, content)
    if not isinstance(content, list) or not content:
        raise InvalidField(field, content, "a string or a list of text parts")
    parts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidField(f"{field}[{i}]", part, 'a part {"type": "text", "text": ...}')
        parts.append(valid_text(f"{field}[{i}].text", part["text"]))
    return "".join(parts)


def _prompt_ids(field: str, value: Sequence[object], limits: Limits, keep: int | None) -> tuple[int, ...]:
    kept = value if keep is None else value[-keep:]
    check_length(field, len(kept), limits)  # before millions of ids are looked at
    return token_ids(field, kept, limits.vocab_size)
