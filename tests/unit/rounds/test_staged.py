"""Leases in whose tokens the host has a part roll with the others, and stream what plain decoding does."""

from __future__ import annotations

import json
from random import Random

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from distspec.constraints import guide
from distspec.protocol.messages import Drop, Freed, Progress, Refused
from distspec.protocol.values import SamplingParams
from tests.chain import wish
from tests.desks import GREEDY, PENALIZED, SEEDED, SHAPE, desk, engine, guard, lease, plain, run, standalone, stream
from tests.schemas import SCHEMAS
from tests.spelling import decode, grammars
from tests.unit.rounds.test_constraints import PROMPT as ANSWER
from tests.unit.rounds.test_constraints import engine as letters
from tests.unit.rounds.test_constraints import params, schema, serve
from tests.unit.rounds.test_logprobs import check
from tests.unit.rounds.test_loop import Log, progress

PROMPT = (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2)
ASKING = replace(GREEDY, logprobs=2)


@pytest.mark.parametrize(("one", "drafts"), [(ASKING, 0), (ASKING, 3), (PENALIZED, 0), (PENALIZED, 3)])
def test_a_round_is_begun_before_the_last_one_is_read_and_finished_after_it(one: SamplingParams, drafts: int) -> None:
    """The host's part waits for texts, the forward does not."""
    subject = desk(engine(4), standalone(0) if drafts else None, overlap=True)
    log = Log.of(subject)
    subject.receive(lease(1, PROMPT, replace(one, prompt_tokens=len(PROMPT)), drafts))
    run(subject)
    rounds = log.kinds.count("b")
    assert rounds > 4
    assert log.kinds == "bf" + "brf" * (rounds - 1) + "r"


def test_rows_of_both_kinds_share_a_forward() -> None:
    subject = desk(engine(4), overlap=True)
    log = Log.of(subject)
    asked = [SEEDED, ASKING, PENALIZED, GREEDY]
    asked = [replace(one, prompt_tokens=len(PROMPT) - request) for request, one in enumerate(asked)]
    for request, one in enumerate(asked):
        subject.receive(lease(request, PROMPT[request:], one))
    replies = subject.step()
    assert log.events == [("begin", (0, 1, 2, 3), 0), ("finish", (0, 1, 2, 3), 0)]
    replies += run(subject)
    for request, one in enumerate(asked):
        assert stream(replies, request) == plain(PROMPT[request:], one)


def random_params(draw: Random, prompt: int) -> SamplingParams:
    params = replace(draw.choice([SEEDED, GREEDY, PENALIZED]), max_tokens=draw.randint(1, 30), prompt_tokens=prompt)
    params = replace(
        params, seed=draw.getrandbits(64), stop_token_ids=tuple(draw.sample(range(11), draw.randint(0, 2)))
    )
    if draw.random() < 0.7:
        params = wish(draw, params, SHAPE.vocab_size)
    return replace(params, logprobs=draw.choice([None, 0, 3]))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([None, 0, 1]), st.booleans())
@example(seed=1, drafter=0, overlap=True)
def test_streams_are_those_of_plain_decoding_whatever_is_asked(seed: int, drafter: int | None, overlap: bool) -> None:
    """Requests come while others roll; stops cut accepted runs; what is told is of the tokens that are said."""
    draw = Random(seed)
    subject = desk(engine(4), standalone(drafter) if drafter is not None else None, overlap=overlap)
    guard(subject)
    asked: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
    said: list[Progress] = []
    for request in range(5):
        prompt = tuple(draw.randrange(11) for _ in range(draw.randint(1, 20)))
        asked[request] = prompt, random_params(draw, len(prompt))
        drafts = draw.randint(0, 3) if drafter is not None else 0
        said += progress(subject.receive(lease(request, *asked[request], drafts)))
        for _ in range(draw.randint(0, 6)):
            said += progress(subject.step()) if subject.ready() else []
    said += progress(run(subject))
    for request, (prompt, one) in asked.items():
        tokens = stream(said, request)
        assert tokens == plain(prompt, one)
        told = [token for reply in said if reply.request == request for token in reply.logprobs]
        if one.logprobs is None:
            assert not told
        else:
            check(told, (*prompt, *tokens), len(prompt), one.logprobs)


def test_a_root_that_is_of_the_prompt_is_no_output() -> None:
    """Penalties of what came up in the output must not see it, however the lease came to begin with one token."""
    subject = desk(engine(4), overlap=True)
    log = Log.of(subject)
    prompt, one = PROMPT[:1], replace(SEEDED, presence_penalty=-2.0, frequency_penalty=-2.0, prompt_tokens=1)
    subject.receive(lease(1, prompt, one))
    assert subject._loop.roll([held for held in subject._held if held.drafting]) == []
    assert not log.events
    assert stream(run(subject), 1) == plain(prompt, one)


def test_a_request_that_goes_while_its_round_is_in_flight_is_freed_after_it() -> None:
    subject = desk(engine(4), overlap=True)
    guard(subject)
    subject.receive(lease(1, PROMPT, replace(PENALIZED, prompt_tokens=len(PROMPT))))
    for _ in range(3):
        subject.step()
    assert subject.receive(Drop(request=1, epoch=1)) == []
    assert subject.step() == [Freed(request=1, epoch=1)]
    assert not subject.ready()
    subject.check()


# -- constraints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_constrained_answers_roll_beside_free_ones(overlap: bool) -> None:
    asked = [params(schema(name), seed=i) for i, name in enumerate(("person", "invoice", "digits"))]
    asked += [params(None, seed=7, max_tokens=50), replace(params(schema("person"), seed=8), logprobs=2)]
    subject = desk(letters(grammars(), slots=8), overlap=overlap)
    log = Log.of(subject)
    answers = serve(subject, asked)
    assert log.kinds.count("b") > 40
    assert answers == [serve(desk(letters(grammars())), [one])[0] for one in asked]
    jsonschema.Draft202012Validator(SCHEMAS["person"]).validate(json.loads(decode(answers[0])))


def test_a_grammar_that_takes_too_long_ends_its_request_while_others_roll_on(monkeypatch: pytest.MonkeyPatch) -> None:
    free = params(None, max_tokens=40)
    [alone] = serve(desk(letters(grammars())), [free])
    subject = desk(letters(grammars()), overlap=True)
    guard(subject)
    for number, one in enumerate([params(schema("invoice")), free], 1):
        subject.receive(lease(number, ANSWER, one))
    replies = [reply for _ in range(5) for reply in subject.step()]
    assert not any(isinstance(reply, Refused) for reply in replies)
    monkeypatch.setattr(guide, "SLOW_S", 0.0)
    monkeypatch.setattr(guide, "SLOW_PATH_S", 0.0)
    replies += run(subject)
    [refused] = [reply for reply in replies if isinstance(reply, Refused)]
    assert (refused.request, refused.reason) == (1, "constraint")
    assert stream(replies, 2) == alone
    subject.check()
