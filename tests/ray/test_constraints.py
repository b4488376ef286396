"""Structured output of the default model on real actors: prefill hands over to decode, verifiers and drafters are
remote, and every policy gives the same answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from distspec import Fleet
from distspec.errors import RequestError
from tests.schemas import DIGIT, SCHEMAS, thing

pytestmark = [pytest.mark.needs("model"), pytest.mark.usefixtures("cluster")]

NAMES = ("person", "invoice", "one of by tag", "unicode keys", "digits", "annotated", "escapes")
POLICIES = ("ar", "sd", "dsi", "bvsp")


@pytest.fixture(scope="module")
def fleet(cluster: None) -> Iterator[Any]:
    overrides = [
        *("name=structured", "model.max_model_len=512", "engine.num_threads=1", "engine.max_num_seqs=16"),
        *(f"pools.{pool}.replicas=1" for pool in ("prefill", "decode", "verify", "draft")),
    ]
    with Fleet("local", overrides=overrides) as found:
        yield found


def asked(name: str) -> dict[str, Any]:
    text = f"Answer in JSON. Give an example of this: {name}."
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMAS[name], "strict": True}}
    return {"prompts": [{"role": "user", "content": text}], "response_format": form, "max_tokens": 80}


@pytest.mark.timeout(900)
async def test_answers_validate_and_are_the_same_under_every_policy(fleet: Any) -> None:
    """All of them at once, beside some that are free."""
    asks = [(name, policy, seed) for seed, name in enumerate(NAMES) for policy in POLICIES]
    constrained = [fleet.agenerate(**asked(name), seed=seed, policy=policy) for name, policy, seed in asks]
    free = [fleet.agenerate("Once upon a time", max_tokens=20, seed=i, ignore_eos=True) for i in range(4)]
    found = [one for [one] in await asyncio.gather(*constrained, *free)]
    assert [len(one.token_ids) for one in found[len(asks) :]] == [20] * 4
    for i, name in enumerate(NAMES):
        first, *others = found[i * len(POLICIES) : (i + 1) * len(POLICIES)]
        assert all(other.token_ids == first.token_ids for other in others), name
        if first.finish_reason == "stop":
            jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(first.text))
    assert sum(one.finish_reason == "stop" for one in found[: len(asks)]) >= len(asks) // 2


def test_other_kinds_of_constraints_hold(fleet: Any) -> None:
    def generate(**structured: Any) -> str:
        found = fleet.generate("One of them:", structured_outputs=structured, max_tokens=40, temperature=0, policy="sd")
        return str(found[0].text)

    assert re.fullmatch("[a-c]{3}-[0-9]{2}", generate(regex="[a-c]{3}-[0-9]{2}"))
    assert generate(choice=["north", "south by west"]) in ("north", "south by west")
    assert re.fullmatch("(ab)+", generate(grammar='root ::= "ab" | "ab" root'))


def test_what_explodes_is_refused_while_others_go_on(fleet: Any) -> None:
    bad = thing(True, a={"type": "string", "pattern": "^[^a]{0,9000}$"})
    with pytest.raises(RequestError, match="within 5 s") as error:
        fleet.generate("x", structured_outputs={"json": bad})
    assert (error.value.status, error.value.field) == (400, "structured_outputs.json")
    found = fleet.generate("x", structured_outputs={"json": thing(True, a=DIGIT)}, max_tokens=20)
    jsonschema.Draft202012Validator(thing(True, a=DIGIT)).validate(json.loads(found[0].text))
