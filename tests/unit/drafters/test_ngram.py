"""The n-gram drafter against a naive search, whatever was cut and appended before."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.config import Ngram
from distspec.drafters.base import DraftRow, Proposal
from distspec.drafters.ngram import NgramDrafter
from distspec.errors import IllegalTransition
from distspec.protocol.messages import ROOT, SamplingParams

PARAMS = SamplingParams(max_tokens=100)
tokens = st.lists(st.integers(0, 3), max_size=12)
edits = st.lists(st.tuples(st.floats(0, 1), tokens), min_size=1, max_size=8)


def naive(text: list[int], count: int, options: Ngram) -> list[int]:
    """Search the text backwards, longest suffix first."""
    for size in range(options.max_n, options.min_n - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                return text[end : end + count]
    return []


@settings(deadline=None)
@given(edits, st.integers(0, 6), st.integers(1, 3), st.integers(0, 3))
def test_equals_a_naive_search_after_any_edits(
    steps: list[tuple[float, list[int]]], count: int, min_n: int, more: int
) -> None:
    options = Ngram(max_n=min_n + more, min_n=min_n)
    drafter = NgramDrafter(options, max_model_len=10_000)
    text: list[int] = []
    for fraction, appended in steps:
        keep = round(fraction * len(text))
        text = text[:keep] + appended
        [proposal] = drafter.propose([DraftRow(7, keep, tuple(appended), count, PARAMS)])
        assert proposal == Proposal.chain(naive(text, count, options))


@settings(deadline=None)
@given(edits)
def test_a_rewound_index_is_the_index_of_the_shorter_text(steps: list[tuple[float, list[int]]]) -> None:
    edited, fresh = (NgramDrafter(Ngram(), max_model_len=10_000) for _ in range(2))
    text: list[int] = []
    for fraction, appended in steps:
        keep = round(fraction * len(text))
        text = text[:keep] + appended
        edited.propose([DraftRow(1, keep, tuple(appended), 1, PARAMS)])
    fresh.propose([DraftRow(1, 0, tuple(text), 1, PARAMS)])
    assert edited._texts[1]._ends == fresh._texts[1]._ends


def test_a_chain_hangs_each_token_below_the_one_before() -> None:
    assert Proposal.chain([5, 6, 7]) == Proposal((5, 6, 7), (ROOT, 0, 1))


@settings(deadline=None)
@given(tokens, st.integers(0, 20))
def test_nothing_reaches_past_max_model_len(text: list[int], room: int) -> None:
    drafter = NgramDrafter(Ngram(), max_model_len=len(text) + room)
    [proposal] = drafter.propose([DraftRow(1, 0, tuple(text), 8, PARAMS)])
    assert len(proposal.tokens) <= room


def test_a_proposal_ends_with_a_stop_token() -> None:
    drafter = NgramDrafter(Ngram(), max_model_len=100)
    params = SamplingParams(max_tokens=100, stop_token_ids=(9,))
    [proposal] = drafter.propose([DraftRow(1, 0, (1, 2, 8, 9, 8, 1, 2), 5, params)])
    assert proposal.tokens == (8, 9)


def test_requests_do_not_see_each_other() -> None:
    drafter = NgramDrafter(Ngram(), max_model_len=100)
    first, second = drafter.propose(
        [DraftRow(1, 0, (1, 2, 3, 1, 2), 2, PARAMS), DraftRow(2, 0, (1, 2, 4, 1, 2), 2, PARAMS)]
    )
    assert (first.tokens, second.tokens) == ((3, 1), (4, 1))


def test_keeping_more_than_there_is_changes_nothing() -> None:
    drafter = NgramDrafter(Ngram(), max_model_len=100)
    drafter.propose([DraftRow(1, 0, (1, 2, 1), 2, PARAMS)])
    with pytest.raises(IllegalTransition):
        drafter.propose([DraftRow(1, 1, (), 2, PARAMS), DraftRow(2, 1, (), 2, PARAMS)])
    [proposal] = drafter.propose([DraftRow(1, 3, (), 2, PARAMS)])
    assert proposal.tokens == (2, 1)


def test_a_forgotten_request_starts_empty() -> None:
    drafter = NgramDrafter(Ngram(), max_model_len=100)
    drafter.propose([DraftRow(1, 0, (1, 2, 1), 2, PARAMS)])
    drafter.forget(1)
    drafter.forget(1)
    with pytest.raises(IllegalTransition):
        drafter.propose([DraftRow(1, 3, (), 2, PARAMS)])
