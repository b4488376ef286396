"""Leased rounds: the stream is the plain one, whatever the drafter does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from distspec.drafters.base import Drafter, DraftRow, Proposal
from distspec.protocol.messages import Drop, Fault, Freed, Lease, Progress, Revoke, Revoked
from distspec.protocol.values import ROOT, Node, SamplingParams
from distspec.rounds import Reply
from distspec.rounds.round import accept
from tests.desks import (
    GREEDY,
    SEEDED,
    SHAPE,
    Guess,
    bushy,
    chain,
    desk,
    engine,
    lease,
    ngram,
    oracle,
    plain,
    run,
    standalone,
    stream,
    wrong,
)

PROMPT = (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "ngram": ngram,
    "oracle": lambda: Guess(oracle),
    "wrong": lambda: Guess(wrong),
    "bushy": lambda: Guess(bushy),
    "same model": lambda: standalone(seed=0),
    "other model": lambda: standalone(seed=1),
}


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_do_not_depend_on_drafter_page_size_or_overlap(
    drafter: str, page_size: int, params: SamplingParams, overlap: bool
) -> None:
    subject = desk(engine(page_size), DRAFTERS[drafter](), overlap=overlap)
    prompts = [PROMPT, (7,), PROMPT[:5]]
    for request, prompt in enumerate(prompts):
        assert subject.receive(lease(request, prompt, params, drafts=4)) == []
    replies = run(subject)
    for request, prompt in enumerate(prompts):
        assert stream(replies, request) == plain(prompt, params)


def test_a_round_says_when_its_drafter_worked() -> None:
    """Before the round's own step, which ended before the next draft began."""
    subject = desk(engine(), Guess(oracle))
    subject.receive(lease(1, (7,), GREEDY, drafts=3))
    rounds = [reply for reply in run(subject) if isinstance(reply, Progress)]
    moments = [moment for reply in rounds if any(reply.drafting) for moment in (*reply.drafting, *reply.span)]
    assert moments == sorted(set(moments))
    assert len(moments) == 4 * sum(reply.drafted != (0,) for reply in rounds) > 0

    plainly = desk(engine())
    plainly.receive(lease(1, (7,), GREEDY, drafts=3))
    assert all(reply.drafting == (0.0, 0.0) for reply in run(plainly) if isinstance(reply, Progress))


def test_a_drafter_that_is_right_saves_steps_and_says_so() -> None:
    def steps(name: str) -> int:
        subject = desk(engine(), DRAFTERS[name]())
        subject.receive(lease(1, (7,), SEEDED, drafts=3))
        progress = run(subject)
        assert all(isinstance(reply, Progress) for reply in progress)
        return len(progress)

    assert steps("none") == steps("wrong") == SEEDED.max_tokens
    assert steps("oracle") == steps("same model") == SEEDED.max_tokens // 4


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize(("name", "overlap"), [("oracle", False), ("same model", False), ("same model", True)])
def test_drafts_are_judged_where_they_belong_whoever_comes_and_goes(name: str, overlap: bool, drafts: int) -> None:
    """A drafter that is right is always right, in a batch whose requests begin and end at different times."""
    subject, replies = desk(engine(), DRAFTERS[name](), overlap=overlap), list[Reply]()
    for request, (prompt, length) in enumerate([((7,), 9), (PROMPT, 40), ((9, 2), 21), (PROMPT[:5], 5), ((4,), 30)]):
        params = replace(SEEDED if request % 2 else GREEDY, max_tokens=length, seed=request)
        replies += subject.receive(lease(request, prompt, params, drafts=drafts))
        for _ in range(2):
            replies += subject.step()
    replies += run(subject)
    rounds = [reply for reply in replies if isinstance(reply, Progress)]
    assert sum(sum(reply.accepted) for reply in rounds) > 50 * drafts / (drafts + 1)
    assert all(reply.accepted == reply.drafted for reply in rounds)


def test_progress_counts_what_was_drafted_and_what_of_it_was_emitted() -> None:
    subject = desk(engine(), Guess(bushy))
    subject.receive(lease(1, (7,), GREEDY, drafts=4))
    for reply in run(subject):
        assert isinstance(reply, Progress)
        assert reply.drafted[0] <= 4
        assert reply.accepted == (len(reply.tokens) - 1,)
        assert reply.accepted[0] == reply.drafted[0] // 2


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(0, 6), st.integers(0, SHAPE.vocab_size - 1))
def test_the_stream_ends_where_the_plain_one_does(max_tokens: int, drafts: int, stop: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, seed=3, stop_token_ids=(stop,))
    subject = desk(ENGINE, Guess(oracle))
    subject.receive(lease(1, PROMPT, params, drafts))
    replies = run(subject)
    tokens = plain(PROMPT, params)
    assert stream(replies, 1) == tokens
    for reply in replies:
        assert isinstance(reply, Progress)
        assert reply.start + reply.drafted[0] < max_tokens, "nothing is drafted that could not be emitted"
    last = replies[-1]
    assert isinstance(last, Progress)
    assert last.ended == ("stop" if tokens[-1] == stop else "length")
    text = [*PROMPT, *tokens]
    held = ENGINE.sequence(0).tokens
    assert held == text[: len(held)], "committed KV holds committed tokens only"
    assert subject.receive(Drop(request=1, epoch=1)) == [Freed(request=1, epoch=1)]


ENGINE = engine(page_size=4)


def test_a_stream_may_fill_the_model_to_the_last_position() -> None:
    prompt = PROMPT * 16
    params = SamplingParams(max_tokens=SHAPE.max_position - len(prompt), temperature=0.0)
    for name, overlap in product(("none", "ngram", "same model", "oracle"), (False, True)):
        subject = desk(engine(), DRAFTERS[name](), overlap=overlap)
        subject.receive(lease(1, prompt, params, drafts=5))
        assert stream(run(subject), 1) == plain(prompt, params)


@pytest.mark.parametrize("steps", range(6))
def test_a_revoked_lease_goes_on_elsewhere_with_the_same_tokens(steps: int) -> None:
    one, two = (desk(engine(page_size=4), Guess(bushy), budget=8) for _ in range(2))
    one.receive(lease(1, PROMPT, SEEDED, drafts=4))
    tokens = stream([reply for _ in range(steps) for reply in one.step()], 1)
    [revoked] = one.receive(Revoke(request=1, epoch=2))
    assert isinstance(revoked, Revoked)
    assert (revoked.length, revoked.epoch) == (len(tokens), 2)
    assert revoked.computed <= len(PROMPT) + len(tokens)
    assert not one.ready()
    text = (*PROMPT, *tokens)
    more = Lease(
        request=1,
        epoch=2,
        start=revoked.computed,
        tokens=text[revoked.computed :],
        emitted=len(tokens),
        **chain(4),
    )
    assert one.receive(more) == []
    whole = Lease(request=1, epoch=2, start=0, tokens=text, emitted=len(tokens), params=SEEDED, **chain(2))
    assert two.receive(whole) == []
    for subject in (one, two):
        rest = [token for reply in run(subject) if isinstance(reply, Progress) for token in reply.tokens]
        assert [*tokens, *rest] == plain(PROMPT, SEEDED)


def test_a_round_that_is_cut_after_its_root_was_judged_is_ended_and_loses_no_outcome() -> None:
    """Its nodes do not fit into one step, so a Revoke may come between two."""
    late: list[int] = []
    for steps in range(12):
        subject = desk(engine(page_size=4), Guess(oracle), budget=3)
        subject.receive(lease(1, PROMPT, SEEDED, drafts=4))
        replies = [reply for _ in range(steps) for reply in subject.step()]
        *last, revoked = subject.receive(Revoke(request=1, epoch=2))
        tokens = stream([*replies, *last], 1)
        assert isinstance(revoked, Revoked)
        assert revoked.length == len(tokens)
        assert tokens == plain(PROMPT, SEEDED)[: len(tokens)]
        late += [len(reply.tokens) for reply in last if isinstance(reply, Progress)]
        subject.check()
    assert late, "some round was cut"
    assert max(late) > 1, "and what was accepted of it by then was kept"


def test_a_drafter_that_breaks_costs_no_tokens() -> None:
    def broken(row: DraftRow, text: tuple[int, ...]) -> Proposal:
        if len(text) > 15:
            raise RuntimeError("no more")
        return oracle(row, text)

    subject = desk(engine(), Guess(broken))
    subject.receive(lease(1, PROMPT, SEEDED, drafts=2))
    replies = run(subject)
    assert stream(replies, 1) == plain(PROMPT, SEEDED)
    assert [reply for reply in replies if isinstance(reply, Fault)] == [Fault(reason="drafter: RuntimeError: no more")]


def test_of_two_children_with_one_token_only_one_is_kept() -> None:
    nodes = [Node(id=4, parent=ROOT, token=8), Node(id=5, parent=ROOT, token=8), Node(id=6, parent=5, token=9)]
    walk = accept(nodes, [(ROOT, 8), (4, 9), (5, 9), (6, 1)], GREEDY, emitted=0)
    assert (walk.tokens, walk.path, walk.ended) == ((8, 9), (4,), None)


def test_nothing_is_kept_past_the_end_of_the_stream() -> None:
    nodes = [Node(id=0, parent=ROOT, token=8), Node(id=1, parent=0, token=9), Node(id=2, parent=1, token=3)]
    outcomes = [(ROOT, 8), (0, 9), (1, 3), (2, 4)]
    stopped = accept(nodes, outcomes, SamplingParams(max_tokens=9, stop_token_ids=(9,)), emitted=0)
    assert (stopped.tokens, stopped.path, stopped.ended) == ((8, 9), (0, 1), "stop")
    full = accept(nodes, outcomes, SamplingParams(max_tokens=9), emitted=8)
    assert (full.tokens, full.path, full.ended) == ((8,), (0,), "length")
