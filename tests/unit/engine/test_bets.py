"""A bet is judged as a node of its own would be, and leaves no trace once it is taken back."""

from __future__ import annotations

import pytest

from distspec.engine import Segment
from distspec.protocol.values import ROOT, Node
from tests.desks import GREEDY, PENALIZED, SEEDED, engine, model, next_token

PROMPT = (1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("params", [GREEDY, SEEDED, PENALIZED], ids=["greedy", "seeded", "penalized"])
def test_a_bet_has_the_outcome_of_a_node_beside_other_segments(page_size: int, params: object) -> None:
    assert isinstance(params, type(GREEDY))
    of = engine(page_size)
    slots = [of.open(PROMPT[:length], params, use_cache=False) for length in (7, 1, 5)]
    for slot in slots:
        of.reserve(slot, 16)
    node = (Node(id=0, parent=ROOT, token=9),)
    segments = [Segment(slots[0], PROMPT, bet=9), Segment(slots[1], PROMPT[:1], node), Segment(slots[2], PROMPT[:5])]
    for segment, outcome in zip(segments, of.step(segments), strict=True):
        assert outcome.root == next_token(model(), segment.tokens, params)
        below = [] if segment.rows == len(segment.tokens) else [next_token(model(), (*segment.tokens, 9), params)]
        assert outcome.nodes == below


def test_a_bet_that_is_taken_back_was_never_shared() -> None:
    """The page that the bet filled is written again: nobody else may hold it."""
    of = engine(page_size=4)
    slot = of.open(PROMPT, GREEDY)
    of.reserve(slot, 12)
    of.step([Segment(slot, PROMPT, bet=9)])
    assert len(set(of.books.cache.pages if of.books.cache else ())) == 0
    of.sequence(slot).retract(1)
    of.step([Segment(slot, (3, 8))])
    other = of.open((*PROMPT, 3, 1), GREEDY)
    assert of.sequence(other).length == 8
    of.reserve(other, 4)
    [outcome] = of.step([Segment(other, (1,))])
    assert outcome.root == next_token(model(), (*PROMPT, 3, 1), GREEDY)
    of.check()


def test_a_bet_that_is_taken_back_was_never_counted() -> None:
    """Penalties go by the text as it is after each step, whatever was bet on before."""
    of = engine()
    text: tuple[int, ...] = PROMPT
    slot = of.open(text, PENALIZED)
    of.reserve(slot, 60)
    tokens = text
    for step in range(12):
        bet = (9, 2, 5)[step % 3]
        [outcome] = of.step([Segment(slot, tokens, bet=bet)])
        assert outcome.root == next_token(model(), text, PENALIZED)
        assert outcome.nodes == [next_token(model(), (*text, bet), PENALIZED)]
        if step % 2 and bet != outcome.root:
            of.sequence(slot).retract(1)
            tokens = (outcome.root,)
        else:  # the bet passes for the outcome
            text = (*text, bet)
            tokens = (outcome.nodes[0],)
        text = (*text, *tokens)
