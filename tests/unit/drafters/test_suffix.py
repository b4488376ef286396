"""The suffix drafter: what it proposes follows from the text alone, and is worth its confidence."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.config import Suffix
from distspec.drafters.automaton import Automaton
from distspec.drafters.base import DraftRow, Proposal
from distspec.drafters.suffix import SuffixDrafter, guesses
from distspec.errors import IllegalTransition
from distspec.protocol.values import ROOT, SamplingParams, Shape
from tests.growth import edits, shapes, tokens

PARAMS = SamplingParams(max_tokens=100)
NEVER = Suffix(min_prob=1e-9)


def propose(drafter: SuffixDrafter, text: list[int], shape: Shape, *, keep: int = 0, request: int = 1) -> Proposal:
    [proposal] = drafter.propose([DraftRow(request, keep, tuple(text[keep:]), shape, PARAMS)])
    return proposal


def depths(proposal: Proposal) -> list[int]:
    out: list[int] = []
    for parent in proposal.parents:
        out.append(1 if parent == ROOT else out[parent] + 1)
    return out


def path_odds(proposal: Proposal) -> list[float]:
    """Log-probability of each node's path."""
    out: list[float] = []
    for parent, score in zip(proposal.parents, proposal.scores, strict=True):
        out.append(score if parent == ROOT else out[parent] + score)
    return out


@settings(deadline=None)
@given(edits, shapes)
def test_a_tree_keeps_to_its_shape_after_any_edits(steps: list[tuple[float, list[int]]], shape: Shape) -> None:
    drafter = SuffixDrafter(Suffix(min_prob=0.05), max_model_len=10_000)
    text: list[int] = []
    for fraction, appended in steps:
        keep = round(fraction * len(text))
        text = text[:keep] + appended
        proposal = propose(drafter, text, shape, keep=keep)
        assert len(proposal.tokens) <= shape.nodes
        assert all(ROOT <= parent < i for i, parent in enumerate(proposal.parents))
        assert max(depths(proposal), default=0) <= shape.depth
        siblings = list(zip(proposal.parents, proposal.tokens, strict=True))
        assert len(set(siblings)) == len(siblings)
        assert all(proposal.parents.count(parent) <= shape.topk for parent in proposal.parents)
        assert all(value >= math.log(0.05) - 1e-9 for value in path_odds(proposal))
        assert set(proposal.tokens) <= set(text)


@settings(deadline=None)
@given(edits)
def test_a_first_draft_depends_on_the_text_alone(steps: list[tuple[float, list[int]]]) -> None:
    """Whatever was cut and appended before; nothing was drafted before, so no tree lives on."""
    shape = Shape(steps=3, topk=2, width=2)
    edited, fresh = (SuffixDrafter(Suffix(), max_model_len=10_000) for _ in range(2))
    text: list[int] = []
    for fraction, appended in steps:
        keep = round(fraction * len(text))
        text = text[:keep] + appended
        propose(edited, text, Shape(steps=0), keep=keep)
    assert propose(edited, text, shape, keep=len(text)) == propose(fresh, text, shape)


def naive(text: list[int], max_match: int) -> dict[int, float]:
    """Probability of each token that may follow a text, by counting."""
    probabilities: dict[int, float] = {}
    left = 1.0
    places: list[int] = []
    for size in range(min(max_match, len(text)), 0, -1):
        context = text[len(text) - size :]
        before, places = places, [e for e in range(size, len(text)) if text[e - size : e] == context]
        if len(places) == len(before):  # a longer context that occurs in as many places has said it all
            continue
        following = [text[e] for e in places if text[e] not in probabilities]
        if following:
            new = 2 * len(set(following)) / (2 * len(set(following)) + size * len(following))
            for token in set(following):
                probabilities[token] = left * (1 - new) * following.count(token) / len(following)
            left *= new
    return probabilities


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6))
def test_guesses_equal_counting(text: list[int], max_match: int) -> None:
    automaton = Automaton(max_match)
    automaton.extend(text)
    found = guesses([(automaton, automaton.end)], 100)
    assert {token: math.exp(score) for token, score in found} == pytest.approx(naive(text, max_match))
    assert sum(math.exp(score) for _, score in found) <= 1 + 1e-9
    assert all(a[1] >= b[1] for a, b in pairwise(found))
    least = math.log(0.1)
    assert guesses([(automaton, automaton.end)], 100, least) == [guess for guess in found if guess[1] >= least]


def test_the_most_frequent_continuation_comes_first_then_the_latest() -> None:
    often = [7, 1, 7, 1, 7, 2, 7]
    assert propose(SuffixDrafter(NEVER, max_model_len=100), often, Shape(steps=1, topk=2)).tokens == (1, 2)
    tied = [7, 1, 8, 7, 2, 9, 7]
    assert propose(SuffixDrafter(NEVER, max_model_len=100), tied, Shape(steps=1, topk=2)).tokens == (2, 1)


@pytest.mark.parametrize("match", [1, 2, 5, 20])
def test_a_draft_is_as_long_as_the_match_warrants(match: int) -> None:
    """n matched tokens that occurred once before; as far as max_match counts."""
    seen = list(range(10, 210))
    text = [*seen, 1, *seen[50 : 50 + match]]
    drafter = SuffixDrafter(Suffix(max_match=100, min_prob=0.11), max_model_len=1000)
    proposal = propose(drafter, text, Shape(steps=64))
    likely = [k for k in range(1, 65) if match * (match + 1) / ((match + k) * (match + k + 1)) >= 0.11]
    assert proposal.tokens == tuple(seen[50 + match :][: max(likely)])
    assert propose(drafter, [*text, 300], Shape(steps=64), keep=len(text)).tokens == ()


def test_a_tree_goes_on_from_its_tip_and_survives_what_it_foresaw() -> None:
    seen = list(range(10, 60))
    text = [*seen, 1, *seen[:8]]
    drafter = SuffixDrafter(Suffix(), max_model_len=1000)
    assert propose(drafter, text, Shape(steps=2)).tokens == tuple(seen[8:10])
    assert propose(drafter, text, Shape(steps=2), keep=len(text)).tokens == tuple(seen[8:12])
    longer = [*text, seen[8]]
    assert propose(drafter, longer, Shape(steps=0), keep=len(text)).tokens == tuple(seen[9:12])
    assert propose(drafter, longer, Shape(steps=1), keep=len(longer)).tokens == tuple(seen[9:13])
    assert propose(drafter, [*longer, 2], Shape(steps=0), keep=len(longer)).tokens == ()


def test_an_end_without_a_guess_is_asked_again_when_more_is_sure() -> None:
    """The last node of a path that was too long to be likely grows once the path is text."""
    seen = list(range(10, 60))
    text = [*seen, 1, *seen[:2]]
    drafter = SuffixDrafter(Suffix(min_prob=0.29), max_model_len=1000)
    first = propose(drafter, text, Shape(steps=64))
    assert first.tokens == tuple(seen[2:4])
    text += first.tokens
    assert propose(drafter, text, Shape(steps=64), keep=len(text) - 2).tokens == tuple(seen[4:7])


def test_a_text_that_repeats_itself_is_continued_past_its_end() -> None:
    text = [1, 2, 3] * 4
    assert propose(SuffixDrafter(Suffix(), max_model_len=100), text, Shape(steps=7)).tokens == (1, 2, 3, 1, 2, 3, 1)


@settings(deadline=None)
@given(tokens, st.integers(0, 20))
def test_nothing_reaches_past_max_model_len(text: list[int], room: int) -> None:
    drafter = SuffixDrafter(NEVER, max_model_len=len(text) + room)
    assert max(depths(propose(drafter, text, Shape(steps=30, topk=2, width=2))), default=0) <= room


def test_a_proposal_ends_with_a_stop_token() -> None:
    drafter = SuffixDrafter(NEVER, max_model_len=100)
    params = SamplingParams(max_tokens=100, stop_token_ids=(9,))
    [proposal] = drafter.propose([DraftRow(1, 0, (1, 2, 8, 9, 8, 1, 2), Shape(steps=5), params)])
    assert proposal.tokens == (8, 9)


def test_outputs_are_shared_only_when_asked_and_prompts_never() -> None:
    prompt, output = [50, 51, 52, 53, 54], [10, 11, 12, 13, 14, 15]
    for share, expected in ((False, ()), (True, (13, 14))):
        drafter = SuffixDrafter(Suffix(share_outputs=share), max_model_len=100)
        propose(drafter, prompt, Shape(steps=0))
        propose(drafter, prompt + output, Shape(steps=0), keep=len(prompt))
        assert propose(drafter, [11, 12], Shape(steps=2), request=2).tokens == ()  # not ended yet
        drafter.forget(2)
        drafter.forget(1)
        assert propose(drafter, [11, 12], Shape(steps=2), request=3).tokens == expected
        assert propose(drafter, [50, 51], Shape(steps=2), request=4).tokens == ()


def test_a_longer_match_among_shared_outputs_beats_the_own_text() -> None:
    drafter = SuffixDrafter(Suffix(share_outputs=True), max_model_len=100)
    propose(drafter, [1], Shape(steps=0))
    propose(drafter, [1, 20, 21, 22, 23], Shape(steps=0), keep=1)
    drafter.forget(1)
    assert propose(drafter, [22, 99, 5, 20, 21, 22], Shape(steps=1), request=2).tokens == (23,)
    assert propose(drafter, [22, 99, 5, 6, 22], Shape(steps=1), request=3).tokens == (99,)  # of equals the own


def test_keeping_more_than_there_is_changes_nothing() -> None:
    drafter = SuffixDrafter(NEVER, max_model_len=100)
    propose(drafter, [1, 2, 1], Shape(steps=0))
    with pytest.raises(IllegalTransition):
        drafter.propose([DraftRow(1, 1, (), Shape(steps=2), PARAMS), DraftRow(2, 1, (), Shape(steps=2), PARAMS)])
    assert propose(drafter, [1, 2, 1], Shape(steps=2), keep=3).tokens == (2, 1)


def test_a_forgotten_request_starts_empty() -> None:
    drafter = SuffixDrafter(Suffix(share_outputs=True), max_model_len=100)
    propose(drafter, [1, 2, 1], Shape(steps=2))
    drafter.forget(1)
    drafter.forget(1)
    with pytest.raises(IllegalTransition):
        propose(drafter, [1, 2, 1], Shape(steps=2), keep=3)
