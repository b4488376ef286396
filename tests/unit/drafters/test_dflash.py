"""A drafter that fills in blocks: each tree is what a dense model says of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path as Folder
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec import config
from distspec.drafters.base import DraftRow, Proposal
from distspec.drafters.dflash import DflashDrafter
from distspec.models.dflash import Dflash
from distspec.protocol.values import ROOT, SamplingParams, Shape
from distspec.sampling import SamplingRows, best
from tests import chain, plain
from tests.featured import ALL, BLOCKS, BLOCKS_SPECULATORS, CPU, SHAPE, features, made, outer, published

NAMES = list(BLOCKS | BLOCKS_SPECULATORS)
TEXT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3)
GREEDY = SamplingParams(max_tokens=99, temperature=0.0)
SEEDED = SamplingParams(max_tokens=99, temperature=1.0, seed=4, stop_token_ids=(0, 7))
EDITED = SamplingParams(max_tokens=99, temperature=0.0, prompt_tokens=2, bad_words=((3,), (4, 5)), presence_penalty=1.5)


def drafter(name: str, page_size: int = 4, num_pages: int = 400, budget: int = 12) -> DflashDrafter:
    model = made(name)
    assert isinstance(model, Dflash)
    options = config.Engine(page_size=page_size, num_pages=num_pages, max_num_batched_tokens=budget)
    return DflashDrafter(model, options, max_model_len=SHAPE.max_position, device=CPU)


def told(name: str, request: int, keep: int, text: Sequence[int], shape: Shape, params: SamplingParams) -> DraftRow:
    given = features(list(text), made(name).taps)[keep:] if text else None
    return DraftRow(request, keep, tuple(text[keep:]), shape, params, given)


@cache
def dense(name: str) -> tuple[dict[str, Any], plain.Tensors]:
    with TemporaryDirectory() as folder:
        _, tree, tensors = published(name, Folder(folder))
        return tree, {key: tensor.clone() for key, tensor in tensors.items()}


@torch.inference_mode()
def expected(name: str, text: Sequence[int], shape: Shape, params: SamplingParams) -> Proposal:
    """The best guess of each place below that of the place before, with its siblings."""
    tokens: list[int] = []
    parents: list[int] = []
    if len(text) < 2 or not shape.steps:
        return Proposal((), ())
    found = plain.block(*dense(name), outer(), list(text), features(list(text), ALL[name].taps))
    above = ROOT
    for place, logits in enumerate(found[: shape.depth]):
        logits = chain.edited(logits, text, params)  # no place knows what is guessed before it
        rows = SamplingRows.of([params], [len(text) + place], CPU)
        ranked, scores = (x[0].tolist() for x in best(logits[None], rows, shape.topk))
        known = [token for token, score in zip(ranked, scores, strict=True) if score > -torch.inf]
        known = known[: shape.nodes - len(tokens)]
        first = len(tokens)
        tokens += known
        parents += [above] * len(known)
        above = first
        if not known or known[0] in params.stop_token_ids:
            break
    return Proposal(tuple(tokens), tuple(parents))


shapes = st.builds(
    Shape, steps=st.integers(0, 2), topk=st.integers(1, 3), nodes=st.integers(1, 14), depth=st.integers(0, 6)
)
pieces = st.lists(st.integers(0, SHAPE.vocab_size - 1), max_size=4)
turns = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([0, 0, 1, 3]), st.integers(0, 5), pieces, shapes), max_size=6
)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=25)
@given(turns, st.sampled_from([1, 4, 16]), st.sampled_from([GREEDY, SEEDED, EDITED]))
def test_a_block_is_that_of_the_dense_model_whatever_came_before(
    name: str, turns: list[tuple[int, int, int, list[int], Shape]], page_size: int, params: SamplingParams
) -> None:
    subject = drafter(name, page_size)
    texts: dict[int, list[int]] = {}
    last: dict[int, Proposal] = {}
    for request, cut, follow, piece, shape in turns:
        text = texts.setdefault(request, [])
        before, keep = list(text), max(0, len(text) - cut)
        came = last[request].tokens[:follow] if request in last and not cut else ()
        text[keep:] = [*came, *piece]
        [found] = subject.propose([told(name, request, keep, text, shape, params)])
        subject.check()
        if text != before and shape.steps and shape.depth:
            book = expected(name, text, shape, params)
            assert (found.tokens, found.parents) == (book.tokens, book.parents)
        last[request] = found


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_batch_do_not_see_each_other(name: str) -> None:
    subject, shape = drafter(name), Shape(steps=1, topk=2)
    texts = [TEXT, TEXT[:2], TEXT[::-1], TEXT[:7], TEXT[:1]]
    found = subject.propose([told(name, i, 0, text, shape, GREEDY) for i, text in enumerate(texts)])
    books = [expected(name, text, shape, GREEDY) for text in texts]
    assert [(p.tokens, p.parents) for p in found] == [(p.tokens, p.parents) for p in books]
    assert [len(p.tokens) for p in found] == [8, 8, 8, 8, 0]


def test_asking_again_computes_nothing_and_a_text_that_followed_keeps_its_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, count = drafter("dflash"), []
    forward = subject._model.forward
    monkeypatch.setattr(subject._model, "forward", lambda *rows: (count.append(1), forward(*rows))[1])
    [first] = subject.propose([told("dflash", 1, 0, TEXT, Shape(steps=1), GREEDY)])
    again = told("dflash", 1, len(TEXT), TEXT, Shape(steps=3), GREEDY)
    assert subject.propose([again]) == [first]
    text = (*TEXT, *first.tokens[:1])
    [rest] = subject.propose([told("dflash", 1, len(TEXT), text, Shape(steps=0), GREEDY)])
    assert rest.tokens == first.tokens[1:]
    assert len(count) == 1


@pytest.mark.parametrize("room", [0, 1, 3])
def test_nothing_reaches_past_max_model_len(room: int) -> None:
    text = (TEXT * 20)[: SHAPE.max_position - room]
    [found] = drafter("dflash").propose([told("dflash", 1, 0, text, Shape(steps=1), GREEDY)])
    assert len(found.tokens) == room
