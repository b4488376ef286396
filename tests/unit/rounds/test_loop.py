"""Rounds that roll: what is launched when, who leaves, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from distspec.drafters.base import Drafter, DraftRow
from distspec.engine import Begun, Flight
from distspec.protocol.messages import Draft, Drop, Fault, Freed, Lease, Progress, Refused, Revoke, Revoked
from distspec.protocol.values import Constraint, SamplingParams, Shape
from distspec.rounds import Desk, Reply
from distspec.rounds.loop import chain_steps, needs_host
from tests.desks import (
    GREEDY,
    SEEDED,
    SHAPE,
    Guess,
    bushy,
    chain,
    desk,
    engine,
    extend,
    guard,
    lease,
    ngram,
    plain,
    run,
    standalone,
    stream,
)

PROMPT = (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2)


@dataclass
class Log:
    """What a desk launches, begins, finishes and reads, in order: (which of these, slots, steps)."""

    events: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)

    @classmethod
    def of(cls, subject: Desk) -> Log:
        log, rolling = cls(), subject._loop._rolling
        launch, begin, finish = rolling.launch, rolling.begin, rolling.finish

        def watched(flight: Flight, kind: str) -> Flight:
            log.events.append((kind, flight.slots, flight.steps))
            read = flight.read

            def landed() -> list[tuple[int, ...]]:
                log.events.append(("read", flight.slots, flight.steps))
                return read()

            flight.read = landed  # type: ignore[method-assign]
            return flight

        def begun(slots: Sequence[int], steps: int) -> Begun:
            log.events.append(("begin", tuple(slots), steps))
            return begin(slots, steps)

        rolling.launch = lambda slots, steps: watched(launch(slots, steps), "launch")  # type: ignore[method-assign]
        rolling.begin = begun  # type: ignore[method-assign]
        rolling.finish = lambda one, going: watched(finish(one, going), "finish")  # type: ignore[method-assign]
        return log

    @property
    def kinds(self) -> str:
        return "".join(kind[0] for kind, _, _ in self.events)


def progress(replies: Sequence[Reply]) -> list[Progress]:
    return [reply for reply in replies if isinstance(reply, Progress)]


# -- order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 3])
def test_each_round_is_launched_before_the_one_before_it_is_read(drafts: int) -> None:
    """With overlap; without, the same rounds come one by one, and so do tokens."""
    said: list[list[int]] = []
    for overlap, order in ((True, "l" + "lr" * 40 + "r"), (False, "lr" * 40)):
        subject = desk(engine(4), standalone(1), overlap=overlap)
        log = Log.of(subject)
        subject.receive(lease(1, PROMPT, replace(GREEDY, max_tokens=42), drafts))
        said.append(stream(run(subject), 1))
        middle = len(log.kinds) - 2
        assert log.kinds[:middle] == order[:middle]
        assert log.kinds.count("l") == log.kinds.count("r")
    assert said[0] == said[1] == plain(PROMPT, replace(GREEDY, max_tokens=42))


def test_plain_decoding_launches_no_round_in_vain() -> None:
    """How many tokens a round brings is known, so the last one is."""
    subject = desk(engine(4), overlap=True)
    log = Log.of(subject)
    for request in (1, 2):
        subject.receive(lease(request, PROMPT[request:], GREEDY))
    replies = run(subject)
    assert all(stream(replies, request) == plain(PROMPT[request:], GREEDY) for request in (1, 2))
    assert log.kinds.count("l") == GREEDY.max_tokens - 1


def test_rows_that_draft_alike_go_together() -> None:
    """One launch for each number of drafts: plain rows, chains of one and of three; the prompts are no rounds."""
    subject = desk(engine(4), standalone(0), overlap=True)
    log = Log.of(subject)
    for request, drafts in enumerate((0, 1, 3, 3, 0)):
        subject.receive(lease(request, (request, 7), SEEDED, drafts))
    subject.step()
    assert sorted(log.events) == [("launch", (0, 4), 0), ("launch", (1,), 1), ("launch", (2, 3), 3)]
    slots = [slots for kind, slots, _ in log.events if kind == "launch"]
    run(subject)
    assert len(log.events) > 2 * len(slots)
    for kind, _, steps in log.events:
        assert kind in ("launch", "read")
        assert steps in (0, 1, 3)


# -- who rolls ------------------------------------------------------------------------------------------

NEEDLESS = {"max_tokens", "seed", "choice", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "prompt_tokens"}
"""Of SamplingParams: what the device knows, or the host looks at afterwards. prompt_logprobs are none of a round's."""

OTHERS: dict[str, Any] = {
    "min_tokens": 2,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1,
    "logit_bias": ((1, 1.0),),
    "allowed_token_ids": (1,),
    "bad_words": ((1, 2),),
    "logprobs": 0,
    "constraint": Constraint(kind="json_object"),
}


def test_every_parameter_is_known_to_need_the_host_or_not() -> None:
    """A new one must be decided on."""
    names = {f.name for f in msgspec.structs.fields(SamplingParams)}
    assert names == NEEDLESS | OTHERS.keys() | {"prompt_logprobs"}
    for name, value in OTHERS.items():
        assert needs_host(replace(GREEDY, **{name: value})), name
    assert not needs_host(replace(SEEDED, choice=2, top_k=4, min_p=0.1, stop_token_ids=(3,), prompt_tokens=9))


def test_chains_are_as_long_as_their_shape_allows_and_trees_are_none() -> None:
    assert chain_steps(None, 5) == 0
    assert chain_steps(Shape(steps=4), 4) == 4
    assert chain_steps(Shape(steps=4), 3) == chain_steps(Shape(steps=4, nodes=3), 4) == 3
    assert chain_steps(Shape(steps=4, depth=2), 4) == 2
    assert chain_steps(Shape(steps=4, topk=2), 4) is None


@pytest.mark.parametrize(
    ("drafter", "more"),
    [
        (lambda: standalone(0), {"shape": Shape(steps=3, topk=2, width=2), "nodes": 5}),
        (ngram, chain(3)),
        (lambda: Guess(bushy), chain(2)),
    ],
    ids=["a tree", "no lender", "no lender, a tree"],
)
def test_what_cannot_roll_takes_ordinary_steps(drafter: Callable[[], Drafter], more: dict[str, Any]) -> None:
    subject = desk(engine(4), drafter(), overlap=True)
    log = Log.of(subject)
    subject.receive(lease(1, PROMPT, SEEDED, **more))
    assert stream(run(subject), 1) == plain(PROMPT, SEEDED)
    assert not log.events


def test_prompts_and_rows_that_roll_go_on_beside_each_other() -> None:
    """A long prompt comes in chunks; between them the others get a round each."""
    subject = desk(engine(4), standalone(0), budget=16, overlap=True)
    log = Log.of(subject)
    subject.receive(lease(1, PROMPT, SEEDED, 2))
    subject.step()
    long = PROMPT * 8
    subject.receive(lease(2, long, GREEDY, 2))
    replies: list[Reply] = []
    while (computed := subject._engine.sequence(1).length) < len(long) - 16:
        before = log.kinds.count("l")
        replies += subject.step()
        assert log.kinds.count("l") == before + 1
        assert subject._engine.sequence(1).length == computed + 16
    replies = [*progress(replies), *run(subject)]
    assert [t for r in progress(replies) if r.request == 1 for t in r.tokens] == plain(PROMPT, SEEDED)[1:]
    assert stream(replies, 2) == plain(long, GREEDY)


def test_a_row_without_room_for_a_round_takes_ordinary_steps() -> None:
    """Another request holds all pages but what the text needs; near its end a round with all drafts does not fit in."""
    of = engine(1, num_pages=4 * len(PROMPT) + GREEDY.max_tokens)
    subject = desk(of, standalone(1), overlap=True)
    log = Log.of(subject)
    subject.receive(extend(1, (9, *PROMPT[::-1] * 3)[:-1]))
    subject.step()
    subject.receive(lease(2, PROMPT, GREEDY, 16))
    replies = run(subject)
    assert stream(replies, 2) == plain(PROMPT, GREEDY)
    assert not any(isinstance(reply, Refused) for reply in replies)
    assert 0 < log.kinds.count("l") < len(progress(replies)) - 1


# -- ends -----------------------------------------------------------------------------------------------

STOPPING = replace(SEEDED, max_tokens=40, stop_token_ids=(plain(PROMPT, SEEDED)[8],))


def test_a_round_in_flight_outlives_its_stream_and_nobody_hears_of_it() -> None:
    """A stop token is only seen when it is read. The slot stays open until the round after it was read."""
    of = engine(4)
    subject = desk(of, standalone(1), overlap=True)
    guard(subject)
    log = Log.of(subject)
    subject.receive(lease(1, PROMPT, STOPPING, 2))
    replies: list[Reply] = []
    while not any(reply.ended for reply in progress(replies)):
        replies += subject.step()
    assert stream(replies, 1) == plain(PROMPT, STOPPING)
    assert log.kinds.count("l") == log.kinds.count("r") + 1
    assert subject.ready()
    assert subject.receive(Drop(request=1, epoch=1)) == []
    assert of._open
    assert subject.step() == [Freed(request=1, epoch=1)]
    assert log.kinds.count("l") == log.kinds.count("r")
    assert not of._open
    assert not subject.ready()
    subject.check()


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_lease_is_given_back_when_its_round_in_flight_was_read(steps: int, drafts: int) -> None:
    """With the next step, which launches none of it any more; what comes after gets the right tokens."""
    subject = desk(engine(4), standalone(0), overlap=True)
    log = Log.of(subject)
    for request in (1, 2):
        subject.receive(lease(request, PROMPT[request:], SEEDED, drafts))
    replies = [reply for _ in range(steps) for reply in subject.step()]
    replies += subject.receive(Revoke(request=1, epoch=2))
    began = len(log.events)
    replies += subject.step()
    assert [slots for kind, slots, _ in log.events[began:] if kind == "launch"] == [(1,)]
    [revoked] = [reply for reply in replies if isinstance(reply, Revoked)]
    tokens = stream(replies, 1)
    assert (revoked.length, revoked.computed) == (len(tokens), len(PROMPT) - 1 + len(tokens) - 1)
    more = Lease(request=1, epoch=3, start=revoked.computed, tokens=tuple(tokens[-1:]), emitted=len(tokens), **chain(1))
    assert subject.receive(more) == []
    replies += run(subject)
    for request in (1, 2):
        assert stream(replies, request) == plain(PROMPT[request:], SEEDED)


def test_a_reset_waits_for_what_is_in_flight() -> None:
    of = engine(4)
    subject = desk(of, standalone(1), overlap=True)
    guard(subject)
    log = Log.of(subject)
    for request, drafts in enumerate((0, 2, 2)):
        subject.receive(lease(request, PROMPT[request:], STOPPING, drafts))
    for _ in range(3):
        subject.step()
    subject.receive(Drop(request=2, epoch=1))
    subject.reset()
    assert log.kinds.count("l") == log.kinds.count("r")
    assert not subject.ready()
    assert not of._open
    subject.check()
    subject.receive(lease(1, PROMPT, SEEDED, 2))
    assert stream(run(subject), 1) == plain(PROMPT, SEEDED)


def test_a_request_that_is_leased_is_not_drafted_for_otherwise() -> None:
    subject = desk(engine(4), standalone(0), overlap=True)
    subject.receive(lease(1, PROMPT, SEEDED, 2))
    subject.step()
    draft = Draft(request=1, epoch=1, task=5, keep=0, tokens=PROMPT, shape=Shape(steps=1))
    assert subject.receive(draft) == [Refused(request=1, epoch=1, reason="state", task=5)]
    run(subject)
    assert not subject._engine._open
    subject.check()


# -- books ----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 30),
    st.integers(0, 5),
    st.integers(0, SHAPE.vocab_size - 1),
    st.sampled_from([0, 1]),
    st.booleans(),
    st.booleans(),
)
@example(max_tokens=30, drafts=5, stop=2, seed=0, sampled=True, overlap=True)
def test_books_hold_what_was_said_and_end_where_the_plain_stream_does(
    max_tokens: int, drafts: int, stop: int, seed: int, sampled: bool, overlap: bool
) -> None:
    """Stops in the middle of an accepted run, the last token, and every read in between."""
    params = replace(SEEDED if sampled else GREEDY, max_tokens=max_tokens, stop_token_ids=(stop,))
    of = engine(4)
    subject = desk(of, standalone(seed), overlap=overlap)
    guard(subject)
    subject.receive(lease(1, PROMPT, params, drafts))
    replies: list[Progress] = []
    while subject.ready():
        replies += progress(subject.step())
        text = [*PROMPT, *(token for reply in replies for token in reply.tokens)]
        held = of.sequence(0).tokens
        assert held == text[: len(held)]
        assert len(held) >= len(text) - 1
    tokens = plain(PROMPT, params)
    assert stream(replies, 1) == tokens
    assert replies[-1].ended == ("stop" if tokens[-1] == stop else "length")
    for reply in replies:
        assert reply.drafted[0] <= min(drafts, max_tokens - reply.start - 1), "none that could not be emitted counts"
        assert reply.accepted[0] <= reply.drafted[0]
        ends_accepted = reply.ended == "stop" and len(reply.tokens) == reply.accepted[0]
        assert len(reply.tokens) == reply.accepted[0] + 1 or ends_accepted
    assert of.sequence(0).room < of.page_size, "what was held ahead is given back"


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 12), st.integers(1, 5), st.sampled_from([0, 1]), st.integers(1, 4))
def test_a_drafter_gets_its_slots_back_as_if_it_had_drafted_all_along(
    steps: int, drafts: int, seed: int, grown: int
) -> None:
    """It proposes what one proposes that computes the whole text, and keeps what it has of it."""
    drafter = standalone(seed)
    subject = desk(engine(4), drafter, overlap=True)
    subject.receive(lease(1, PROMPT, SEEDED, drafts))
    said = [reply for _ in range(steps) for reply in subject.step()]
    subject.receive(Revoke(request=1, epoch=2))
    text = (*PROMPT, *stream([*said, *run(subject)], 1))
    row = DraftRow(1, 0, text, Shape(steps=grown), SEEDED)
    computed = len(drafter.engine.sequence(0).tokens) if drafter.engine._open else 0
    assert computed >= len(text) - 2 or steps == 1
    [mine], [other] = drafter.propose([row]), standalone(seed).propose([row])
    assert (mine.tokens, mine.parents) == (other.tokens, other.parents)
    assert mine.scores == pytest.approx(other.scores, abs=1e-4)
    drafter.check()


def test_a_drafter_that_breaks_when_it_lends_costs_no_tokens() -> None:
    drafter = standalone(0)
    subject = desk(engine(4), drafter, overlap=True)

    def broken(rows: Sequence[DraftRow]) -> list[Any]:
        raise RuntimeError("no more")

    drafter.lend = broken  # type: ignore[method-assign]
    subject.receive(lease(1, PROMPT, SEEDED, 2))
    replies = run(subject)
    assert stream(replies, 1) == plain(PROMPT, SEEDED)
    assert [reply for reply in replies if isinstance(reply, Fault)] == [Fault(reason="drafter: RuntimeError: no more")]


# -- time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_round_takes_from_its_launch_or_the_read_before_it_to_its_own(drafts: int, overlap: bool) -> None:
    """Spans of rounds never overlap, and leave no gap where rounds do. What a plain round took is told as its step; how
    long the target took of one that drafts, nobody knows."""
    subject = desk(engine(4), standalone(1), overlap=overlap)
    for request in (1, 2):
        subject.receive(lease(request, PROMPT, GREEDY, drafts))
    said = progress(run(subject))
    _, *rounds = sorted({reply.span for reply in said})
    assert len(rounds) >= GREEDY.max_tokens // 3
    for one, other in pairwise(rounds):
        assert one[1] <= other[0]
        assert (one[1] == other[0]) == overlap
    for reply in said:
        if reply.span in rounds:
            assert reply.step == (2 * (1 + drafts), 0.0 if drafts else reply.span[1] - reply.span[0])
