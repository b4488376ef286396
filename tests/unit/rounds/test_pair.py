"""The round that judges one guess says what a round with a tree of one node says, and leaves the same behind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from distspec.drafters.base import DraftRow, Proposal
from distspec.protocol.messages import Drop, Progress, Revoke, Revoked
from distspec.protocol.values import SamplingParams, Shape
from distspec.rounds import Reply
from distspec.rounds.lease import begin
from distspec.rounds.pair import Pair
from tests.desks import GREEDY, SEEDED, SHAPE, Guess, desk, engine, lease, oracle, plain, run, stream

PROMPT = (1, 2, 3, 4, 5, 1, 2, 3)
PAIR, TREE = Shape(steps=1), Shape(steps=1, topk=2)


def at_times(row: DraftRow, text: tuple[int, ...]) -> Proposal:
    """Right, wrong, or silent, by the length of the text."""
    [token] = oracle(row, text).tokens
    return Proposal.chain([[token], [(token + 1) % SHAPE.vocab_size], []][len(text) % 3])


def timeless(replies: Sequence[Reply]) -> list[Reply]:
    return [replace(reply, span=(0.0, 0.0), step=(0, 0.0)) for reply in replies if isinstance(reply, Progress)]


def test_a_chain_of_one_takes_the_short_way_and_nothing_else_does() -> None:
    of = engine()
    subject = desk(of, Guess(at_times))
    for request, (shape, nodes) in enumerate([(PAIR, 1), (TREE, 1), (Shape(steps=2), 2), (None, 0)]):
        message = lease(request, PROMPT[:1], GREEDY, shape=shape, nodes=nodes)
        subject.receive(message)
        held = subject._held.get(request)
        assert held is not None
        assert isinstance(begin(held, message, PROMPT[:1], 0), Pair) == (request == 0)
        assert not isinstance(begin(held, message, PROMPT, 0), Pair), "a prompt is no single token"


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 20), st.integers(0, SHAPE.vocab_size)), min_size=1, max_size=4
    ),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([1, 3, 64]),
    st.booleans(),
)
def test_the_short_way_says_what_a_tree_of_one_node_says(
    wanted: list[tuple[int, int, int]], page_size: int, budget: int, sampled: bool
) -> None:
    """Progress for progress, but for the time; and the same tokens where the budget has no row left for a guess."""
    said: list[list[Reply]] = []
    for shape in (PAIR, TREE):
        of = engine(page_size)
        subject = desk(of, Guess(at_times), budget=budget)
        for request, (length, most, stop) in enumerate(wanted):
            params = replace(SEEDED if sampled else GREEDY, max_tokens=most, stop_token_ids=(stop,))
            subject.receive(lease(request, PROMPT[:length], params, shape=shape, nodes=1))
        said.append(timeless(run(subject)))
        for request in range(len(wanted)):
            subject.receive(Drop(request=request, epoch=1))
        subject.check()
        assert subject._held.get(0) is None
    for request in range(len(wanted)):
        assert stream(said[0], request) == stream(said[1], request)
    if budget == 64:
        assert said[0] == said[1]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_guess_that_was_taken_back_leaves_no_trace_in_the_prefix_cache(page_size: int) -> None:
    """The next request with the same text finds pages of right tokens only, and goes on as ever."""

    def wrong(row: DraftRow, text: tuple[int, ...]) -> Proposal:
        return Proposal.chain([(oracle(row, text).tokens[0] + 1) % SHAPE.vocab_size])

    of = engine(page_size)
    subject = desk(of, Guess(wrong))
    for request, drafts in ((1, 1), (2, 1), (3, 0)):
        params = SamplingParams(max_tokens=12, seed=7)
        subject.receive(lease(request, PROMPT, params, drafts=drafts))
        assert stream(run(subject), request) == plain(PROMPT, params)
        assert of.sequence(0).tokens == [*PROMPT, *plain(PROMPT, params)[:-1]]
        subject.receive(Drop(request=request, epoch=1))
        subject.check()


def test_a_revoked_pair_holds_committed_tokens_only() -> None:
    of = engine(4)
    subject = desk(of, Guess(at_times))
    subject.receive(lease(1, PROMPT, SEEDED, drafts=1))
    for steps in range(1, 5):
        assert len(subject.step()) == 1
        assert of.sequence(0).tokens == [*PROMPT, *plain(PROMPT, SEEDED)][: of.sequence(0).length], steps
    [revoked] = subject.receive(Revoke(request=1, epoch=2))
    assert isinstance(revoked, Revoked)
    assert revoked.computed == len(PROMPT) + revoked.length - 1
