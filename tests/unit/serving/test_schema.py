"""What a request asks for is bounded before it is looked at: nobody's millions of items hold up the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distspec.errors import InvalidField
from distspec.serving import prompts, schema
from distspec.serving.limits import Limits
from distspec.serving.schema import ChatRequest, CompletionRequest


class Unread(list[Any]):
    """A list of which nobody may look at more than the first item."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("every item was looked at")


@pytest.mark.parametrize(
    ("field", "ask"),
    [
        ("prompt", lambda limits: prompts.prompts(Unread([1] * limits.max_model_len), limits)),
        ("prompt[1]", lambda limits: prompts.prompts(["a", Unread([1] * limits.max_model_len)], limits)),
        ("prompt", lambda limits: prompts.prompts(Unread(["a"] * (limits.max_streams + 1)), limits)),
        ("messages", lambda limits: prompts.turns(Unread([{"role": "user"}] * limits.max_model_len), limits)),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_looked_at(
    limits: Limits, field: str, ask: Callable[[Limits], object]
) -> None:
    with pytest.raises(InvalidField, match="at most") as caught:
        ask(limits)
    assert caught.value.field == field


def test_too_many_stop_ids_are_refused(limits: Limits) -> None:
    few, many = ([1] * (schema.MAX_STOP_IDS + more) for more in (0, 1))
    assert schema.parse(CompletionRequest, {"prompt": "a", "stop_token_ids": few}, limits).stop_token_ids == few
    with pytest.raises(InvalidField, match="at most 256 ids"):
        schema.parse(CompletionRequest, {"prompt": "a", "stop_token_ids": many}, limits)


def test_the_longest_prompt_is_taken(limits: Limits) -> None:
    longest = [1] * (limits.max_model_len - 1)
    assert prompts.prompts(longest, limits) == [tuple(longest)]
    assert prompts.prompts([longest, "a"], limits) == [tuple(longest), "a"]


@pytest.mark.parametrize("mixed", [[1, "a"], ["a", 1]])
def test_ids_and_text_do_not_mix(limits: Limits, mixed: list[Any]) -> None:
    with pytest.raises(InvalidField, match="prompt"):
        prompts.prompts(mixed, limits)


def test_every_field_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    fields = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
    assert {field for field in fields if f"`{field}`" not in page} == set()
