"""Drafts keep to what a grammar allows, hold what it forces, and are as they were where nothing is constrained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from distspec.constraints import Compiler, Grammars, Guide
from distspec.drafters import Guided
from distspec.drafters.base import DraftRow, Proposal
from distspec.protocol.values import ROOT, Constraint, SamplingParams, Shape
from tests.schemas import SCHEMAS
from tests.spelling import decode, encode, end_id, grammars, tokenizer, vocab_size, walk

PERSON = Constraint(kind="json_schema", text=json.dumps(SCHEMAS["person"]))
PROMPT = tuple(encode("who?"))
FREE = SamplingParams(max_tokens=99, prompt_tokens=len(PROMPT))
HELD = SamplingParams(max_tokens=99, prompt_tokens=len(PROMPT), constraint=PERSON, stop_token_ids=(end_id(),))
SHAPE = Shape(steps=4, nodes=12, depth=8)


class Says:
    """A drafter that proposes what it was told to."""

    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal
        self.forgotten: list[int] = []

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        return [self.proposal] * len(rows)

    def forget(self, request: int) -> None:
        self.forgotten.append(request)

    def check(self) -> None:
        """There are no pages."""


class Never(Executor):
    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return Future()


def ask(drafter: Guided, text: str, params: SamplingParams = HELD, shape: Shape = SHAPE, keep: int = 0) -> Proposal:
    whole = (*PROMPT, *encode(text))
    return drafter.propose([DraftRow(1, keep, whole[keep:], shape, params)])[0]


def guided(proposal: Proposal) -> Guided:
    return Guided(Says(proposal), grammars())


def paths(of: Proposal) -> list[list[int]]:
    """Tokens down to each node."""
    found: list[list[int]] = []
    for token, parent in zip(of.tokens, of.parents, strict=True):
        found.append([*(found[parent] if parent != ROOT else []), token])
    return found


def test_what_has_not_grown_to_its_end_says_nothing() -> None:
    unfinished = Proposal((), (), left=2)
    assert ask(guided(Proposal((), ())), "").tokens, "the answer begins with what the grammar forces"
    assert ask(guided(unfinished), "") == unfinished


@st.composite
def trees(draw: st.DrawFn) -> Proposal:
    """Any tree, some of whose branches follow an answer."""
    answers = [encode(walk(PERSON, seed)) for seed in range(3)]
    tokens, parents, depths = list[int](), list[int](), list[int]()
    for i in range(draw(st.integers(0, 10))):
        parent = draw(st.integers(-1, i - 1))
        depth = depths[parent] + 1 if parent >= 0 else 0
        answer = draw(st.sampled_from(answers))
        right = answer[depth] if depth < len(answer) else end_id()
        token = draw(st.sampled_from([right, right, draw(st.integers(0, vocab_size() - 1))]))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens, parents, depths = [*tokens, token], [*parents, parent], [*depths, depth]
        else:
            tokens, parents, depths = [*tokens, 0], [*parents, ROOT], [*depths, 0]
    scores = tuple(-0.5 for _ in tokens) if draw(st.booleans()) else ()
    return Proposal(tuple(tokens), tuple(parents), scores)


@given(trees(), st.integers(0, 20))
def test_what_is_drafted_is_allowed_and_nothing_allowed_is_lost(proposal: Proposal, seed: int) -> None:
    text = walk(PERSON, 0)[:seed]
    found = ask(guided(proposal), text)
    guide = Guide.of(HELD, grammars())
    assert guide is not None
    matcher = guide.at([*PROMPT, *encode(text)])
    assert all(matcher.allowed(path) == len(path) for path in paths(found))
    kept = [path for path in paths(proposal) if matcher.allowed(path) == len(path)]
    assert paths(found)[: len(kept)] == kept
    assert len(found.tokens) <= max(SHAPE.nodes, len(kept))
    assert all(parent < i for i, parent in enumerate(found.parents))
    assert len(found.scores) in (0, len(found.tokens))


@given(trees())
def test_where_nothing_is_constrained_a_proposal_stays_as_it_is(proposal: Proposal) -> None:
    assert ask(guided(proposal), "any", FREE) == proposal


def test_what_must_come_is_drafted_as_far_as_the_shape_goes() -> None:
    nothing = Proposal((), ())
    [*_, longest] = paths(ask(guided(nothing), '{"name":"a"'))
    assert decode(longest) == ',"age":'
    assert [len(path) for path in paths(ask(guided(nothing), '{"name":"a"', shape=Shape(steps=1, depth=2)))] == [1, 2]
    assert len(ask(guided(nothing), '{"name":"a"', shape=Shape(steps=1, nodes=3)).tokens) == 3
    assert ask(guided(nothing), '{"name":"a') == nothing


def test_what_must_come_follows_drafts_that_are_right_and_replaces_those_that_are_not() -> None:
    right, wrong = Proposal.chain(encode('b"')), Proposal.chain(encode('b"x'))
    for proposal in (right, wrong):
        [*_, longest] = paths(ask(guided(proposal), '{"name":"a'))
        assert decode(longest) == 'b","age":'


def test_a_text_that_is_cut_and_goes_on_elsewhere_is_followed() -> None:
    drafter = guided(Proposal((), ()))
    ask(drafter, '{"name":"abc","age":1')
    assert ask(drafter, '{"name":"', keep=len(PROMPT)) == Proposal((), ())
    [*_, longest] = paths(ask(drafter, '{"name":"",', keep=len(PROMPT) + 2))
    assert decode(longest) == '"age":'


def test_nothing_is_drafted_below_a_stop_token() -> None:
    stops = SamplingParams(
        max_tokens=9, prompt_tokens=len(PROMPT), constraint=PERSON, stop_token_ids=tuple(encode(","))
    )
    [*_, longest] = paths(ask(guided(Proposal((), ())), '{"name":"a"', stops))
    assert decode(longest) == ","


def test_before_its_grammar_is_ready_drafts_are_as_they_are() -> None:
    proposal = Proposal.chain((1, 2, 3))
    waits = Grammars(lambda: Compiler(tokenizer(), vocab_size(), [end_id()]), executor=Never())
    assert ask(Guided(Says(proposal), waits), "") == proposal
    bad = SamplingParams(max_tokens=9, constraint=Constraint(kind="regex", text="("))
    assert ask(guided(proposal), "", bad) == proposal


def test_a_request_is_forgotten_by_both() -> None:
    inner = Says(Proposal((), ()))
    drafter = Guided(inner, grammars())
    ask(drafter, '{"name":"abc"')
    drafter.forget(1)
    drafter.forget(2)
    assert inner.forgotten == [1, 2]
    assert decode(paths(ask(drafter, ""))[-1]) == '{"name":'
