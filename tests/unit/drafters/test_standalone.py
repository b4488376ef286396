"""A drafter with a model of its own: what it proposes depends on the text alone, not on how it got there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec import drafters
from distspec.config import load
from distspec.drafters.base import DraftRow, Proposal
from distspec.drafters.standalone import StandaloneDrafter
from distspec.engine import Outcome, Segment
from distspec.errors import ConfigError, IllegalTransition
from distspec.models import random_model, save_pretrained
from distspec.protocol.messages import SamplingParams
from tests.desks import CPU, GREEDY, SEEDED, SHAPE, engine, model, next_token

TEXT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3)


def drafter(page_size: int = 4, num_pages: int | None = None, slots: int = 8, budget: int = 16) -> StandaloneDrafter:
    of = engine(page_size, num_pages, slots)
    return StandaloneDrafter(of, max_num_batched_tokens=budget, max_model_len=SHAPE.max_position)


def expected(text: Sequence[int], count: int, params: SamplingParams = GREEDY) -> Proposal:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(next_token(model(), (*text, *tokens), params))
        if tokens[-1] in params.stop_token_ids:
            break
    return Proposal.chain(tokens)


pieces = st.lists(st.integers(0, SHAPE.vocab_size - 1), max_size=6)
followed = st.integers(0, 5)
edits = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1), followed, pieces, st.integers(0, 4)), max_size=12)


@settings(deadline=None)
@given(edits, st.sampled_from([1, 4, 16]), st.integers(1, 3), st.sampled_from([1, 3, 16]))
def test_a_proposal_is_the_models_own_continuation_whatever_came_before(
    turns: list[tuple[int, float, int, list[int], int]], page_size: int, slots: int, budget: int
) -> None:
    """Three requests share few slots; texts are cut anywhere, follow earlier proposals, and go their own way."""
    subject = drafter(page_size, slots=slots, budget=budget)
    params = SamplingParams(max_tokens=99, seed=4, stop_token_ids=(0,))
    texts: dict[int, list[int]] = {}
    proposed: dict[int, tuple[int, ...]] = {}
    for request, fraction, follow, piece, count in turns:
        text = texts.setdefault(request, [])
        keep = max(len(text) - round(fraction * 8), 0) if fraction > 0.5 else len(text)
        taken = proposed.get(request, ())[:follow] if keep == len(text) else ()
        tokens = (*taken, *piece) if text or piece else (1,)
        text[keep:] = tokens
        if not text:
            text.append(1)
            tokens = (1,)
        [proposal] = subject.propose([DraftRow(request, keep, tokens, count, params)])
        subject.check()
        for each in subject._texts.values():
            if each.slot is not None:
                assert list(subject._engine.sequence(each.slot).nodes) == each.nodes
        assert proposal == expected(text, count, params)
        proposed[request] = proposal.tokens


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_rows_of_a_batch_do_not_see_each_other(params: SamplingParams) -> None:
    subject = drafter(budget=5)
    texts = [TEXT, TEXT[:1], TEXT[::-1], TEXT[:7]]
    proposals = subject.propose([DraftRow(i, 0, text, i, params) for i, text in enumerate(texts)])
    assert proposals == [expected(text, i, params) for i, text in enumerate(texts)]


def test_a_text_that_follows_the_proposal_computes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = drafter()
    rows: list[int] = []
    step = subject._engine.step

    def counted(segments: Sequence[Segment]) -> list[Outcome]:
        rows.extend(len(segment.tokens) + len(segment.nodes) for segment in segments)
        return step(segments)

    monkeypatch.setattr(subject._engine, "step", counted)
    [first] = subject.propose([DraftRow(1, 0, TEXT, 4, GREEDY)])
    assert rows == [len(TEXT), 1, 1, 1]
    [second] = subject.propose([DraftRow(1, len(TEXT), first.tokens, 4, GREEDY)])
    assert second == expected((*TEXT, *first.tokens), 4)
    assert rows[4:] == [1, 1, 1, 1]
    length = len(TEXT) + 4
    [third] = subject.propose([DraftRow(1, length, (*second.tokens[:2], 0), 2, GREEDY)])
    assert third == expected((*TEXT, *first.tokens, *second.tokens[:2], 0), 2)
    assert rows[8:] == [1, 1]


def test_asking_again_gives_the_same_and_asking_for_more_goes_on() -> None:
    subject = drafter()
    subject.propose([DraftRow(1, 0, TEXT, 3, SEEDED)])
    for count in (3, 0, 1, 5):
        assert subject.propose([DraftRow(1, len(TEXT), (), count, SEEDED)]) == [expected(TEXT, count, SEEDED)]


@pytest.mark.parametrize("room", [0, 1, 3])
def test_nothing_reaches_past_max_model_len(room: int) -> None:
    text = TEXT * 15
    of = engine()
    subject = StandaloneDrafter(of, max_num_batched_tokens=64, max_model_len=len(text) + room)
    [proposal] = subject.propose([DraftRow(1, 0, text, 8, GREEDY)])
    assert proposal == expected(text, room)


def test_a_text_longer_than_the_drafters_model_gets_no_draft_and_harms_no_other() -> None:
    subject = StandaloneDrafter(engine(), max_num_batched_tokens=64, max_model_len=10_000)
    long = (1,) * (SHAPE.max_position + 1)
    rows = [DraftRow(1, 0, long, 2, GREEDY), DraftRow(2, 0, TEXT, 2, GREEDY)]
    assert subject.propose(rows) == [Proposal((), ()), expected(TEXT, 2)]
    assert subject.propose([DraftRow(1, 5, (), 2, GREEDY)]) == [expected((1,) * 5, 2)]


def test_a_row_without_slot_or_pages_gets_no_draft_and_gets_one_later() -> None:
    rows = [DraftRow(1, 0, TEXT, 2, GREEDY), DraftRow(2, 0, TEXT[::-1], 2, GREEDY)]
    for subject in (drafter(slots=1), drafter(num_pages=5)):
        assert subject.propose(rows) == [expected(TEXT, 2), Proposal((), ())]
        subject.check()
        assert subject.propose([DraftRow(2, len(TEXT), (), 2, GREEDY)]) == [expected(TEXT[::-1], 2)]
        assert subject.propose([DraftRow(1, len(TEXT), (), 2, GREEDY)]) == [expected(TEXT, 2)]


def test_keeping_more_than_there_is_changes_nothing() -> None:
    subject = drafter()
    with pytest.raises(IllegalTransition):
        subject.propose([DraftRow(2, 0, TEXT, 2, GREEDY), DraftRow(1, 3, (), 2, GREEDY)])
    with pytest.raises(IllegalTransition):
        subject.propose([DraftRow(2, 1, (), 2, GREEDY)])


def test_forgetting_frees_the_slot() -> None:
    subject = drafter(slots=1)
    for request in range(3):
        subject.propose([DraftRow(request, 0, TEXT, 2, GREEDY)])
        subject.forget(request)
        subject.forget(request)
    subject.check()
    assert subject._engine.open((1,), GREEDY) == 0


def test_a_configuration_names_its_drafter(tmp_path: object) -> None:
    folder = f"{tmp_path}/target"
    save_pretrained(model(), folder)
    tree = {"model": {"name": folder}, "engine": {"num_pages": 64}, "speculation": {"placement": "local"}}

    def made(**speculation: object) -> drafters.Drafter | None:
        config = load({**tree, "speculation": {"placement": "local", **speculation}})
        return drafters.make(config, max_model_len=64, device=CPU)

    assert made(drafter="none", policy="ar") is None
    assert isinstance(made(drafter="ngram"), drafters.NgramDrafter)
    alone = made(drafter="standalone", draft_model=folder)
    assert alone is not None
    assert alone.propose([DraftRow(1, 0, TEXT, 3, SEEDED)]) == [expected(TEXT, 3, SEEDED)]


def test_a_drafter_of_another_vocabulary_is_refused(tmp_path: object) -> None:
    from dataclasses import replace

    import torch

    bigger = random_model(replace(SHAPE, vocab_size=13), seed=0, dtype=torch.float32, device=CPU)
    save_pretrained(model(), f"{tmp_path}/target")
    save_pretrained(bigger, f"{tmp_path}/bigger")
    config = load(
        {
            "model": {"name": f"{tmp_path}/target"},
            "speculation": {"placement": "local", "drafter": "standalone", "draft_model": f"{tmp_path}/bigger"},
        }
    )
    with pytest.raises(ConfigError, match="13"):
        drafters.make(config, max_model_len=64, device=CPU)
