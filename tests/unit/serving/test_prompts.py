"""What a chat tells its template."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from distspec.errors import InvalidField
from distspec.serving import prompts, schema
from distspec.serving.limits import Limits
from distspec.serving.schema import ChatRequest
from distspec.serving.service import Service
from distspec.serving.text import Text
from tests.unit.serving.conftest import TableClient
from tests.words import byte_level

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ (m.name or m['role']) + ':' + m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{{ '' if think else 'no ' }}"
    "{{ 1 / (divisor or 1) }}{% endif %}"
)
TURN = "<|im_start|>user:hi<|im_end|>"
SAID = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well,"}]


async def prompt_of(limits: Limits, **fields: Any) -> str:
    """The text that the model is given."""
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    service = Service(TableClient(limits.vocab_size), Text(tokenizer), limits)
    asked = schema.parse(ChatRequest, {"messages": SAID[:1], **fields}, limits)
    [job] = await service.chat_jobs(asked)
    return str(tokenizer.decode(job.prompt))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, TURN + "<|im_start|>assistant:no 1.0"),
        ({"chat_template_kwargs": {"think": True, "other": 1}}, TURN + "<|im_start|>assistant:1.0"),
        ({"add_generation_prompt": False}, TURN),
        ({"messages": [{"role": "user", "content": "hi", "name": "user"}]}, TURN + "<|im_start|>assistant:no 1.0"),
        (
            {"messages": [{"role": "tool", "content": "hi", "name": "clock", "tool_call_id": "a"}]},
            "<|im_start|>clock:hi<|im_end|><|im_start|>assistant:no 1.0",
        ),
        ({"messages": [{"role": "user", "content": "hi", "name": None}]}, TURN + "<|im_start|>assistant:no 1.0"),
        ({"continue_final_message": True, "messages": SAID}, TURN + "<|im_start|>assistant:well,"),
    ],
)
async def test_the_template_is_told_what_the_request_says(fields: dict[str, Any], text: str, limits: Limits) -> None:
    assert await prompt_of(limits, **fields) == text


async def test_what_the_template_fails_on_is_the_clients_fault(limits: Limits) -> None:
    with pytest.raises(InvalidField, match="unsupported operand") as error:
        await prompt_of(limits, chat_template_kwargs={"divisor": "x"})
    assert error.value.field == "messages"


def test_no_name_of_the_renderers_own_can_be_given() -> None:
    """What a later version of transformers takes, too."""
    assert set(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) <= prompts.RESERVED
