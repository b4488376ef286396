"""The n-gram drafter: trees that follow from the text alone, grown as asked."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.config import Ngram
from distspec.drafters.base import DraftRow, Proposal
from distspec.drafters.matchers import DeviceMatcher, HostMatcher
from distspec.drafters.ngram import NgramDrafter
from distspec.errors import IllegalTransition
from distspec.protocol.values import ROOT, SamplingParams, Shape
from tests.growth import edits, shapes, tokens

PARAMS = SamplingParams(max_tokens=100)
CPU = torch.device("cpu")


def drafter_of(options: Ngram | None = None, *, max_model_len: int = 10_000, on_tensors: bool = False) -> NgramDrafter:
    """on_tensors: with the matcher that a GPU gets."""
    options = options or Ngram()
    drafter = NgramDrafter(options, max_model_len=max_model_len)
    assert isinstance(drafter._matcher, HostMatcher)
    if on_tensors:
        drafter._matcher = DeviceMatcher(max_n=options.max_n, min_n=options.min_n, device=CPU)
    return drafter


def propose(drafter: NgramDrafter, text: list[int], shape: Shape, *, keep: int = 0, request: int = 1) -> Proposal:
    [proposal] = drafter.propose([DraftRow(request, keep, tuple(text[keep:]), shape, PARAMS)])
    return proposal


def naive(text: list[int], count: int, options: Ngram) -> list[int]:
    """Search the text backwards, longest suffix first, and read on into what was read."""
    for size in range(options.max_n, options.min_n - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                full = list(text)
                for i in range(count):
                    full.append(full[end + i])
                return full[len(text) :]
    return []


@settings(deadline=None)
@given(edits, st.integers(0, 6), st.integers(1, 3), st.integers(0, 3))
def test_a_chain_equals_a_naive_search_after_any_edits(
    steps: list[tuple[float, list[int]]], count: int, min_n: int, more: int
) -> None:
    options = Ngram(max_n=min_n + more, min_n=min_n)
    drafter = drafter_of(options)
    text: list[int] = []
    for fraction, appended in steps:
        keep = round(fraction * len(text))
        text = text[:keep] + appended
        propose(drafter, text, Shape(steps=0), keep=keep)
    assert list(propose(drafter, text, Shape(steps=count), keep=len(text)).tokens) == naive(text, count, options)


@settings(deadline=None)
@given(edits, shapes)
def test_matching_on_tensors_proposes_the_same_trees(steps: list[tuple[float, list[int]]], shape: Shape) -> None:
    one, other = drafter_of(), drafter_of(on_tensors=True)
    text: list[int] = []
    for fraction, appended in steps:
        keep = round(fraction * len(text))
        text = text[:keep] + appended
        assert propose(one, text, shape, keep=keep) == propose(other, text, shape, keep=keep)


@settings(deadline=None)
@given(edits, shapes)
def test_a_tree_keeps_to_its_shape(steps: list[tuple[float, list[int]]], shape: Shape) -> None:
    drafter = drafter_of()
    text: list[int] = []
    for fraction, appended in steps:
        keep = round(fraction * len(text))
        text = text[:keep] + appended
        proposal = propose(drafter, text, shape, keep=keep)
        assert len(proposal.tokens) <= shape.nodes
        depths: list[int] = []
        for i, parent in enumerate(proposal.parents):
            assert ROOT <= parent < i
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        assert max(depths, default=0) <= shape.depth
        siblings = list(zip(proposal.parents, proposal.tokens, strict=True))
        assert len(set(siblings)) == len(siblings)
        assert all(proposal.parents.count(parent) <= shape.topk for parent in proposal.parents)
        assert all(score < 0 for score in proposal.scores)


def test_a_chain_hangs_each_token_below_the_one_before() -> None:
    assert Proposal.chain([5, 6, 7]) == Proposal((5, 6, 7), (ROOT, 0, 1))


def test_branches_are_different_continuations_the_longest_match_first_then_the_latest() -> None:
    text = [1, 2, 30, 31, 1, 2, 40, 41, 2, 50, 51, 1, 2]
    proposal = propose(drafter_of(), text, Shape(steps=2, topk=3, width=3))
    assert proposal.tokens == (40, 30, 50, 41, 31, 51)
    assert proposal.parents == (ROOT, ROOT, ROOT, 0, 1, 2)
    assert proposal.scores[0] > proposal.scores[1] > proposal.scores[2]


@settings(deadline=None)
@given(tokens, st.integers(1, 4))
def test_scores_of_siblings_are_probabilities(text: list[int], topk: int) -> None:
    scores = propose(drafter_of(), text, Shape(steps=1, topk=topk)).scores
    assert sum(math.exp(score) for score in scores) <= 1


def test_a_longer_match_is_trusted_more() -> None:
    scores = [propose(drafter_of(), [*range(9), 99, *range(n)], Shape(steps=4)).scores for n in (1, 2, 3)]
    assert scores[0] < scores[1] < scores[2]
    assert all(list(chain) == sorted(set(chain)) for chain in scores)


def test_a_tree_goes_on_from_its_tip_and_survives_what_it_foresaw() -> None:
    text = [*range(10, 30), 1, 10, 11]
    drafter = drafter_of()
    assert propose(drafter, text, Shape(steps=2)).tokens == (12, 13)
    assert propose(drafter, text, Shape(steps=2), keep=len(text)).tokens == (12, 13, 14, 15)
    assert propose(drafter, [*text, 12], Shape(steps=1), keep=len(text)).tokens == (13, 14, 15, 16)
    assert propose(drafter, [*text, 12, 99], Shape(steps=1), keep=len(text) + 1).tokens == ()


@settings(deadline=None)
@given(tokens, st.integers(0, 20))
def test_nothing_reaches_past_max_model_len(text: list[int], room: int) -> None:
    drafter = drafter_of(max_model_len=len(text) + room)
    assert len(propose(drafter, text, Shape(steps=30)).tokens) <= room


def test_a_proposal_ends_with_a_stop_token() -> None:
    params = SamplingParams(max_tokens=100, stop_token_ids=(9,))
    [proposal] = drafter_of().propose([DraftRow(1, 0, (1, 2, 8, 9, 8, 1, 2), Shape(steps=5), params)])
    assert proposal.tokens == (8, 9)


@pytest.mark.parametrize("on_tensors", [False, True])
def test_requests_of_one_batch_do_not_see_each_other(on_tensors: bool) -> None:
    first, second, none = drafter_of(on_tensors=on_tensors).propose(
        [
            DraftRow(1, 0, (1, 2, 3, 1, 2), Shape(steps=2), PARAMS),
            DraftRow(2, 0, (1, 2, 4, 1, 2), Shape(steps=3, topk=2), PARAMS),
            DraftRow(3, 0, (), Shape(steps=2), PARAMS),
        ]
    )
    assert (first.tokens, second.tokens, none.tokens) == ((3, 1), (4, 1, 2), ())


def test_keeping_more_than_there_is_changes_nothing() -> None:
    drafter = drafter_of()
    propose(drafter, [1, 2, 1], Shape(steps=0))
    with pytest.raises(IllegalTransition):
        drafter.propose([DraftRow(1, 1, (), Shape(steps=2), PARAMS), DraftRow(2, 1, (), Shape(steps=2), PARAMS)])
    assert propose(drafter, [1, 2, 1], Shape(steps=2), keep=3).tokens == (2, 1)


@pytest.mark.parametrize("on_tensors", [False, True])
def test_a_forgotten_request_starts_empty(on_tensors: bool) -> None:
    drafter = drafter_of(on_tensors=on_tensors)
    propose(drafter, [1, 2, 1], Shape(steps=2))
    drafter.forget(1)
    drafter.forget(1)
    with pytest.raises(IllegalTransition):
        propose(drafter, [1, 2, 1], Shape(steps=2), keep=3)
