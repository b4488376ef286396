"""Requests with a constraint on a worker: they wait for their grammar alone, and what they say keeps to it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

import jsonschema
import pytest
import torch

from distspec import config
from distspec.constraints import Compiler, Grammars, guide
from distspec.drafters import Guided, NgramDrafter, StandaloneDrafter
from distspec.drafters.base import Drafter
from distspec.engine import Engine
from distspec.models import random_model
from distspec.models.llama import Llama
from distspec.protocol.messages import Drop, Progress, Refused, Verdict
from distspec.protocol.values import Constraint, SamplingParams
from distspec.rounds import Desk
from tests.desks import chain, desk, extend, lease, run, stream
from tests.schemas import SCHEMAS
from tests.shapes import TINY
from tests.spelling import decode, encode, end_id, grammars, surrogate, tokenizer, vocab_size

CPU = torch.device("cpu")
PROMPT = encode("answer:")
CLOSING = [token for token in range(vocab_size()) if decode([token])[-1:] in ('"', "}", "]", "l")]
"""Made likely, so that random models come to an end."""


def model(seed: int) -> Llama:
    shape = dataclasses.replace(TINY, vocab_size=vocab_size(), max_position=1024)
    return random_model(shape, seed=seed, dtype=torch.float32, device=CPU)


def engine(of: Grammars, seed: int = 0, slots: int = 4) -> Engine:
    options = config.Engine(page_size=4, max_num_seqs=slots, num_pages=slots * 300, max_scratch_nodes=32)
    return Engine(model(seed), options, device=CPU, grammars=of)


def params(constraint: Constraint | None, seed: int = 1, max_tokens: int = 400) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=(end_id(),),
        prompt_tokens=len(PROMPT),
        constraint=constraint,
        logit_bias=((surrogate(), -100.0), *((token, 4.0) for token in CLOSING)),
    )


def schema(name: str) -> Constraint:
    return Constraint(kind="json_schema", text=json.dumps(SCHEMAS[name]))


class Later(Executor):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Any, tuple[Any, ...]]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        found: Future[Any] = Future()
        self.waiting.append((found, fn, args))
        return found

    def work(self) -> None:
        while self.waiting:
            found, fn, args = self.waiting.pop()
            try:
                found.set_result(fn(*args))
            except Exception as error:
                found.set_exception(error)


def compiler() -> Compiler:
    return Compiler(tokenizer(), vocab_size(), [end_id()])


def serve(of: Desk, requests: Sequence[SamplingParams], drafts: int = 0) -> list[list[int]]:
    for number, asked in enumerate(requests):
        of.receive(lease(number, PROMPT, asked, drafts))
    replies = run(of)
    return [stream(replies, number) for number in range(len(requests))]


# -- waiting -------------------------------------------------------------------------------------------


def test_a_request_waits_for_its_grammar_and_nobody_waits_with_it() -> None:
    later = Later()
    of = desk(engine(Grammars(compiler, executor=later)))
    asked = params(schema("person"))
    assert of.receive(lease(1, PROMPT, asked)) == []
    assert not of.ready()
    of.receive(lease(2, PROMPT, params(None, max_tokens=8)))
    assert len(stream(run(of), 2)) == 8
    later.work()
    assert of.compiled() == []
    assert stream(run(of), 1) == serve(desk(engine(grammars())), [asked])[0]


def test_nothing_is_asked_of_the_grammars_of_requests_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    of, asked = desk(engine(grammars()), None), list[int]()
    is_ready = Engine.is_ready

    def ask(self: Engine, slot: int) -> bool:
        asked.append(slot)
        return is_ready(self, slot)

    for request in (1, 2):
        of.receive(lease(request, PROMPT, params(schema("boolean") if request == 2 else None, max_tokens=9)))
    monkeypatch.setattr(Engine, "is_ready", ask)
    of.step()
    assert set(asked) == {1}
    of.receive(Drop(request=2, epoch=1))
    asked.clear()
    of.step()
    assert not asked


def test_a_driven_request_waits_too() -> None:
    later = Later()
    of = desk(engine(Grammars(compiler, executor=later)))
    of.receive(extend(1, PROMPT, params(schema("null"))))
    assert not of.ready()
    later.work()
    of.compiled()
    [verdict] = run(of)
    assert isinstance(verdict, Verdict)
    assert decode([verdict.outcomes[0][1]]) in ("n", "nu", "null")


def test_a_grammar_that_takes_too_long_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide, "SLOW_S", 0.0)
    monkeypatch.setattr(guide, "SLOW_PATH_S", 0.0)
    of = desk(engine(grammars()))
    [alone] = serve(of, [params(None, max_tokens=8)])
    for number, asked in enumerate([params(schema("person")), params(None, max_tokens=8)], 2):
        of.receive(lease(number, PROMPT, asked))
    replies = run(of)
    [refused] = [reply for reply in replies if isinstance(reply, Refused)]
    assert (refused.request, refused.reason) == (2, "constraint")
    assert stream(replies, 3) == alone
    of.check()


@pytest.mark.parametrize("is_late", [True, False])
def test_what_cannot_be_compiled_is_refused_and_leaves_nothing(is_late: bool) -> None:
    later, bad = Later(), params(Constraint(kind="regex", text="("))
    of = desk(engine(Grammars(compiler, executor=later) if is_late else grammars()))
    replies = of.receive(lease(1, PROMPT, bad))
    later.work()
    replies += of.compiled()
    assert replies == [Refused(request=1, epoch=1, reason="constraint")]
    assert not of.ready()
    of.check()


def test_a_request_that_is_dropped_while_it_waits_is_gone() -> None:
    from distspec.protocol.messages import Drop, Freed

    later = Later()
    of = desk(engine(Grammars(compiler, executor=later)))
    of.receive(lease(1, PROMPT, params(schema("null"))))
    assert of.receive(Drop(request=1, epoch=1)) == [Freed(request=1, epoch=1)]
    later.work()
    assert of.compiled() == []
    assert not of.ready()


# -- answers -------------------------------------------------------------------------------------------


def ngram() -> Drafter:
    return Guided(NgramDrafter(config.Ngram(), max_model_len=1024), grammars())


def standalone(seed: int) -> Drafter:
    own = engine(grammars(), seed, slots=40)
    return StandaloneDrafter(own, max_num_batched_tokens=64, max_scratch_nodes=16, max_model_len=1024)


DRAFTERS = {
    "ngram": (ngram, chain(3)),
    "same": (lambda: standalone(0), chain(3)),
    "other": (lambda: standalone(7), chain(2)),
    "pair": (lambda: standalone(0), chain(1)),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_speculation_does_not_change_constrained_answers(name: str) -> None:
    make, _ = DRAFTERS[name]
    drafts = {"ngram": 3, "same": 3, "other": 2, "pair": 1}[name]
    asked = [params(schema(name), seed=i) for i, name in enumerate(("person", "invoice", "unicode keys", "digits"))]
    want = serve(desk(engine(grammars(), slots=8)), asked)
    drafted = desk(engine(grammars(), slots=8), make())
    for number, one in enumerate(asked):
        drafted.receive(lease(number, PROMPT, one, drafts))
    replies = run(drafted)
    assert [stream(replies, number) for number in range(len(asked))] == want
    assert sum(sum(r.accepted) for r in replies if isinstance(r, Progress)) > 10


def test_every_answer_of_the_corpus_validates_thirty_and_more_in_one_batch_beside_free_ones() -> None:
    """One that max_tokens cuts is the beginning of an answer, and says so."""
    names = list(SCHEMAS)
    asked = [params(schema(name), seed=i) for i, name in enumerate(names)]
    free = [params(None, seed=i, max_tokens=30) for i in range(4)]
    of = desk(engine(grammars(), slots=80), ngram(), budget=512)
    answers = serve(of, asked + free, drafts=2)
    for name, answer in zip(names, answers, strict=False):
        assert answer[-1] == end_id(), name
        jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(decode(answer)))
    assert [len(answer) for answer in answers[len(names) :]] == [30] * 4 or any(
        answer[-1] == end_id() for answer in answers[len(names) :]
    )


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9])
@pytest.mark.parametrize("drafts", [0, 3])
def test_what_max_tokens_cuts_is_the_beginning_of_the_answer(max_tokens: int, drafts: int) -> None:
    whole = serve(desk(engine(grammars())), [params(schema("invoice"))])[0]
    of = desk(engine(grammars()), ngram() if drafts else None)
    of.receive(lease(1, PROMPT, params(schema("invoice"), max_tokens=max_tokens), drafts))
    replies = run(of)
    assert stream(replies, 1) == whole[:max_tokens]
    assert [r.ended for r in replies if isinstance(r, Progress)][-1] == "length"


def test_a_request_that_moves_goes_on_where_it_was() -> None:
    """Hand-over, preemption and failover: another worker is told the text, the last token once or again, and says the
    same as the first would have."""
    asked = params(schema("invoice"))
    whole = serve(desk(engine(grammars())), [asked])[0]
    for cut in (1, 2, 7, len(whole) - 1):
        of = desk(engine(grammars()), ngram())
        of.receive(lease(1, [*PROMPT, *whole[:cut]], asked, 2, emitted=cut))
        tokens = [token for r in run(of) if isinstance(r, Progress) for token in r.tokens]
        assert whole[:cut] + tokens == whole


def test_a_constraint_that_begins_within_a_drafted_run_holds_from_there() -> None:
    """The mark that ends what is free comes among drafts: with and without them the answer is the same."""
    thinks = Constraint(kind="regex", text=r"[a-c]{0,6}</t>\{\"x\":[0-9]{1,3}\}")
    asked = [params(thinks, seed=seed) for seed in range(4)]
    want = serve(desk(engine(grammars())), asked)
    assert serve(desk(engine(grammars()), standalone(0)), asked, drafts=4) == want
    for answer in want:
        free, _, strict = decode(answer).partition("</t>")
        assert set(free) <= set("abc")
        assert 0 <= json.loads(strict)["x"] <= 999


def test_what_the_grammar_forces_is_drafted_and_accepted() -> None:
    """Jump-forward: with it more drafts of the same drafter are right."""
    asked = [params(schema("wide"), seed=seed) for seed in range(3)]

    def accepted(drafter: Drafter) -> int:
        of = desk(engine(grammars()), drafter)
        for number, one in enumerate(asked):
            of.receive(lease(number, PROMPT, one, 4))
        return sum(sum(r.accepted) for r in run(of) if isinstance(r, Progress))

    plain = accepted(NgramDrafter(config.Ngram(), max_model_len=1024))
    assert accepted(ngram()) > plain
