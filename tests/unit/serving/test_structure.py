"""What a request says of its answer's form becomes one constraint, which is tried before a worker sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distspec.errors import RequestError
from distspec.protocol.values import Constraint
from distspec.serving import schema
from distspec.serving.limits import Limits
from distspec.serving.schema import ChatRequest, CompletionRequest
from distspec.serving.service import Service
from distspec.serving.structure import asked
from tests.unit.serving.conftest import TableClient

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
AS_SCHEMA = Constraint(kind="json_schema", text=json.dumps(SCHEMA))

FORMS: list[tuple[dict[str, Any], Constraint | None]] = [
    ({}, None),
    ({"response_format": None, "structured_outputs": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"regex": None, "json_object": False}}, None),
    ({"response_format": {"type": "json_object"}}, Constraint(kind="json_object")),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, AS_SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}}, AS_SCHEMA),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "description": "d", "strict": True, "schema": SCHEMA, "x": None},
            }
        },
        AS_SCHEMA,
    ),
    ({"response_format": TAG}, Constraint(kind="structural_tag", text=json.dumps(TAG))),
    ({"structured_outputs": {"json": SCHEMA}}, AS_SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, AS_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, Constraint(kind="json_object")),
    ({"structured_outputs": {"regex": "[ab]+"}}, Constraint(kind="regex", text="[ab]+")),
    (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True, "disable_fallback": False}},
        Constraint(kind="regex", text="a"),
    ),
    (
        {"structured_outputs": {"regex": "a", "disable_additional_properties": False, "whitespace_pattern": None}},
        Constraint(kind="regex", text="a"),
    ),
    ({"structured_outputs": {"disable_fallback": True}}, None),
    ({"structured_outputs": {"choice": ["a", 'b"']}}, Constraint(kind="grammar", text='root ::= "a" | "b\\""')),
    ({"structured_outputs": {"grammar": 'root ::= "x"'}}, Constraint(kind="grammar", text='root ::= "x"')),
    ({"structured_outputs": {"structural_tag": TAG}}, Constraint(kind="structural_tag", text=json.dumps(TAG))),
    ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, Constraint(kind="regex", text="a")),
]


@pytest.mark.parametrize(("fields", "constraint"), FORMS)
def test_every_form_is_one_constraint(fields: dict[str, Any], constraint: Constraint | None, limits: Limits) -> None:
    request = schema.parse(CompletionRequest, {"prompt": "x", **fields}, limits)
    found = asked(request)
    assert (found and found.constraint) == constraint


@pytest.mark.parametrize(("fields", "constraint"), FORMS[5:8] + FORMS[12:16])
async def test_it_travels_with_the_parameters_of_every_stream(
    fields: dict[str, Any], constraint: Constraint, service: Service, limits: Limits
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, **fields}
    jobs = await service.chat_jobs(schema.parse(ChatRequest, body, limits))
    assert [job.params.constraint for job in jobs] == [constraint] * 2


async def test_one_that_cannot_be_compiled_reaches_no_worker(
    service: Service, client: TableClient, limits: Limits
) -> None:
    request = schema.parse(CompletionRequest, {"prompt": "x", "structured_outputs": {"regex": "(?=a)b"}}, limits)
    with pytest.raises(RequestError, match="looking around") as error:
        await service.completion_jobs(request)
    assert (error.value.status, error.value.field) == (400, "structured_outputs.regex")
    assert client.submitted == []


async def test_a_request_that_is_refused_anyway_has_no_trial(service: Service, limits: Limits) -> None:
    """What a trial would find wrong is not found, for what else is wrong comes first."""
    long = [1] * limits.max_model_len
    body = {"prompt": long, "structured_outputs": {"regex": "(?=a)b"}}
    with pytest.raises(RequestError) as error:
        await service.completion_jobs(schema.parse(CompletionRequest, body, limits))
    assert error.value.field == "prompt"
    body = {"prompt": [1], "bad_words": ["a"], "allowed_token_ids": [service.text.encode("a")[-1]], **body}
    body["prompt"] = [1]
    with pytest.raises(RequestError) as error:
        await service.completion_jobs(schema.parse(CompletionRequest, body, limits))
    assert error.value.field == "allowed_token_ids"


@pytest.mark.parametrize("name", ["structured_outputs.regex", None])
async def test_what_workers_refuse_later_is_named_as_it_was_asked_for(
    service: Service, client: TableClient, limits: Limits, name: str | None
) -> None:
    """A grammar that turns out to be ambiguous, and no other refusal."""
    request = schema.parse(CompletionRequest, {"prompt": "x", "structured_outputs": {"regex": "a"}}, limits)
    jobs = await service.completion_jobs(request)
    client.refusal = RequestError("constraint: cannot be held to", "constraint" if name else None)
    with pytest.raises(RequestError) as error:
        await service.complete(jobs)
    assert error.value.field == name
    assert error.value.message == f"{name or 'constraint'}: cannot be held to"
