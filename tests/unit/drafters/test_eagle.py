"""Drafters of one layer fed with features: their trees are those of a dense model that keeps rows in lists."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path as Folder
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from distspec import config
from distspec.drafters.base import DraftRow, Proposal
from distspec.drafters.eagle import EagleDrafter
from distspec.errors import IllegalTransition, InvalidValue
from distspec.models.dflash import Dflash
from distspec.protocol.values import SamplingParams, Shape
from distspec.sampling import SamplingRows, best
from tests import chain, plain
from tests.featured import CPU, FED, SHAPE, features, made, plain_fed
from tests.growth import Growth, Path, paths, shapes

TEXT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3)
GREEDY = SamplingParams(max_tokens=99, temperature=0.0)
SEEDED = SamplingParams(max_tokens=99, temperature=1.0, seed=4, stop_token_ids=(0, 7))
EDITED = SamplingParams(
    max_tokens=99,
    temperature=0.8,
    seed=5,
    prompt_tokens=2,
    bad_words=((3,), (4, 5), (6, 8)),
    logit_bias=((4, 2.0), (6, 2.0), (9, -1.0)),
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=1.5,
)
PARAMS = {"greedy": GREEDY, "seeded": SEEDED, "edited": EDITED}


def drafter(name: str, page_size: int = 4, num_pages: int = 400, budget: int = 16, scratch: int = 64) -> EagleDrafter:
    model = made(name)
    assert not isinstance(model, Dflash)
    options = config.Engine(
        page_size=page_size, num_pages=num_pages, max_num_batched_tokens=budget, max_scratch_nodes=scratch
    )
    return EagleDrafter(model, options, max_model_len=SHAPE.max_position, device=CPU)


def told(name: str, request: int, keep: int, text: Sequence[int], shape: Shape, params: SamplingParams) -> DraftRow:
    """A row that says `text` to a drafter that has its first `keep` tokens."""
    given = features(list(text), made(name).taps)[keep:] if text else None
    return DraftRow(request, keep, tuple(text[keep:]), shape, params, given)


@cache
def dense(name: str) -> plain.Fed:
    with TemporaryDirectory() as folder:
        found = plain_fed(name, Folder(folder))
        found.tensors = {key: tensor.clone() for key, tensor in found.tensors.items()}  # not of a file that goes away
        return found


class Book:
    """What a drafter should propose for one request: rows of the text from the target's features, rows of nodes from
    those of their parents, each once."""

    def __init__(self, name: str, params: SamplingParams) -> None:
        self.name, self.params = name, params
        self.text: list[int] = []
        self.rows: list[plain.Row] = []
        self.nodes: dict[Path, plain.Row] = {}
        self.tree = Growth(self.guess, params.stop_token_ids)

    @torch.inference_mode()
    def turn(self, keep: int, tokens: Sequence[int], shape: Shape) -> Proposal:
        new = [*self.text[:keep], *tokens]
        follows = new[: len(self.text)] == self.text and len(self.text) > 1
        if follows:
            came = tuple(new[len(self.text) :])
            self.tree.follow(came)
            self.nodes = {p[len(came) :]: r for p, r in self.nodes.items() if p[: len(came)] == came != p}
        else:
            self.tree.clear()
            self.nodes, self.rows = {}, []
        self.text = new
        model = dense(self.name)
        fed = model.enter(features(new, made(self.name).taps)[1:]) if len(new) > 1 else []
        for i in range(len(self.rows), len(new) - 1):
            self.rows.append(model.row(new[i + 1], fed[i], i, self.rows))
        shape = structs.replace(shape, depth=min(shape.depth, SHAPE.max_position - len(new)))
        for _ in range(shape.steps if len(new) > 1 else 0):
            self.tree.grow(shape)
        return self.tree.proposal()

    def guess(self, path: Path) -> list[tuple[int, float]]:
        row = self.rows[-1]
        if path:
            above = [self.nodes[path[:end]] for end in range(1, len(path))]
            feature = above[-1][0] if above else self.rows[-1][0]
            position = len(self.rows) + len(above)
            row = self.nodes[path] = dense(self.name).row(path[-1], feature, position, [*self.rows, *above])
        logits = chain.edited(dense(self.name).logits(row[0][None])[0], (*self.text, *path), self.params)
        return ranking(logits[None], self.params, len(self.text) + len(path))


def ranking(logits: Tensor, params: SamplingParams, position: int) -> list[tuple[int, float]]:
    tokens, scores = best(logits, SamplingRows.of([params], [position], CPU), logits.shape[1])
    pairs = zip(tokens[0].tolist(), scores[0].tolist(), strict=True)
    return [(token, score) for token, score in pairs if score > -torch.inf]


def assert_same(found: Proposal, expected: Proposal) -> None:
    assert (found.tokens, found.parents) == (expected.tokens, expected.parents)
    assert found.scores == pytest.approx(expected.scores, abs=1e-3)


pieces = st.lists(st.integers(0, SHAPE.vocab_size - 1), max_size=4)
turns = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from([0, 0, 0, 1, 3]), st.integers(0, 9), pieces, shapes), max_size=6
)


@pytest.mark.parametrize("name", FED)
@settings(deadline=None, max_examples=25)
@given(turns, st.sampled_from([1, 4, 16]), st.sampled_from(list(PARAMS)))
def test_trees_are_those_of_the_dense_model_whatever_came_before(
    name: str, turns: list[tuple[int, int, int, list[int], Shape]], page_size: int, kind: str
) -> None:
    """Requests are cut, follow a path of their tree and go their own way."""
    subject, params = drafter(name, page_size), PARAMS[kind]
    books: dict[int, Book] = {}
    for request, cut, which, piece, shape in turns:
        book = books.setdefault(request, Book(name, params))
        keep = max(0, len(book.text) - cut)
        trees = [(), *book.tree.found] if not cut else [()]
        tokens = [*trees[which % len(trees)], *piece]
        expected = book.turn(keep, tokens, shape)
        [found] = subject.propose([told(name, request, keep, book.text, shape, params)])
        subject.check()
        assert_same(found, expected)


@pytest.mark.parametrize("name", FED)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_rows_of_a_batch_do_not_see_each_other(name: str, params: SamplingParams) -> None:
    subject = drafter(name, budget=6)
    texts = [TEXT, TEXT[:2], TEXT[::-1], TEXT[:7], TEXT[:1], ()]
    shape = Shape(steps=3, topk=2, width=2, nodes=9)
    found = subject.propose([told(name, i, 0, text, shape, params) for i, text in enumerate(texts)])
    for text, proposal in zip(texts, found, strict=True):
        assert_same(proposal, Book(name, params).turn(0, text, shape))
    assert found[4:] == [Proposal((), ())] * 2
    assert len(found[0].tokens) == 9 or 0 in found[0].tokens or 7 in found[0].tokens


@pytest.mark.parametrize("name", FED)
def test_rows_of_the_text_are_always_of_the_targets_features(name: str) -> None:
    """Even those that were nodes: KV and what leaves the layer are as if nothing had been drafted."""
    subject, straight = drafter(name), drafter(name, page_size=16)
    shape = Shape(steps=4, topk=2, width=2, nodes=20)
    [first] = subject.propose([told(name, 1, 0, TEXT, shape, GREEDY)])
    text = (*TEXT, *max(paths(first), key=len)[:3])
    subject.propose([told(name, 1, len(TEXT), text, shape, GREEDY)])
    straight.propose([told(name, 1, 0, text, shape, GREEDY)])
    kept = []
    for each in (subject, straight):
        sequence = each._texts[1].sequence
        assert sequence is not None
        where = each.integers(each.locations(sequence, range(sequence.length)))
        kept.append((each.pool.data.index_select(2, where), each.pool.features.index_select(0, where)))
    torch.testing.assert_close(kept[0], kept[1], atol=1e-4, rtol=1e-4)


def test_a_followed_path_keeps_what_hangs_below_it_and_computes_only_the_new_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = drafter("eagle")
    rows: list[int] = []
    forward = subject._model.forward

    def counted(tokens: Tensor, *more: Tensor) -> Tensor:
        rows.append(len(tokens))
        return forward(tokens, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(subject._model, "forward", counted)
    [first] = subject.propose([told("eagle", 1, 0, TEXT, Shape(steps=4), GREEDY)])
    assert rows == [len(TEXT) - 1, 1, 1, 1]
    text = (*TEXT, *first.tokens[:2])
    [second] = subject.propose([told("eagle", 1, len(TEXT), text, Shape(steps=1), GREEDY)])
    assert rows[4:] == [2, 1]
    assert second.tokens[:2] == first.tokens[2:]
    assert len(second.tokens) == 3


@pytest.mark.parametrize("name", FED)
def test_who_is_called_away_after_each_forward_goes_on_later(name: str) -> None:
    subject, shape = drafter(name, budget=8), Shape(steps=4, topk=2, width=2, nodes=20)
    subject._is_called = lambda: True
    [found] = subject.propose([told(name, 1, 0, TEXT, shape, SEEDED)])
    forwards = 1
    while found.left:
        assert found.tokens == ()
        more = structs.replace(shape, steps=found.left)
        [found] = subject.propose([told(name, 1, len(TEXT), TEXT, more, SEEDED)])
        forwards += 1
    assert forwards == 5, "two chunks of the text, and three of nodes"
    assert_same(found, Book(name, SEEDED).turn(0, TEXT, shape))


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_guesses_beyond_the_draft_vocabulary_are_not_made(name: str) -> None:
    subject, wide = drafter(name), Shape(steps=1, topk=16, nodes=64)
    [found] = subject.propose([told(name, 1, 0, TEXT, wide, SEEDED)])
    ids = made(name).weights.get("ids")
    assert len(found.tokens) == (16 if ids is None else 9)
    assert ids is None or set(found.tokens) == set(ids.tolist())


@pytest.mark.parametrize("room", [0, 1, 3])
def test_nothing_reaches_past_max_model_len(room: int) -> None:
    text = (TEXT * 20)[: SHAPE.max_position - room]
    subject = drafter("eagle3", budget=64)
    [found] = subject.propose([told("eagle3", 1, 0, text, Shape(steps=6), GREEDY)])
    assert len(found.tokens) == room
    longer = (*text, *[1] * (room + 1))
    held = DraftRow(1, len(text), longer[len(text) :], Shape(steps=6), GREEDY, torch.zeros(room + 1, 144))
    assert subject.propose([held]) == [Proposal((), ())]
    subject.check()


def test_a_text_that_gave_up_its_pages_comes_back_with_its_features() -> None:
    """Two texts of 180 tokens take turns in room for one."""
    texts = [(TEXT * 20)[:180], (TEXT[::-1] * 20)[:180]]
    subject, shape = drafter("mtp", num_pages=68, budget=256), Shape(steps=2)
    for round_ in range(3):
        for request, text in enumerate(texts):
            length = 176 + round_
            keep = 0 if not round_ else length - 1
            [found] = subject.propose([told("mtp", request, keep, text[:length], shape, GREEDY)])
            assert_same(found, Book("mtp", GREEDY).turn(0, text[:length], shape))
            subject.check()
    both = [told("mtp", request, 178, text[:179], shape, GREEDY) for request, text in enumerate(texts)]
    assert [len(found.tokens) for found in subject.propose(both)] == [0, 2]
    again = told("mtp", 0, 179, texts[0], shape, GREEDY)
    [found] = subject.propose([again])
    assert_same(found, Book("mtp", GREEDY).turn(0, texts[0], shape))
    subject.check()


def test_a_text_that_finds_no_page_to_grow_into_keeps_what_it_was_told() -> None:
    """One page of 64 for each of two texts that grow beyond it, and one to spare."""
    subject, shape = drafter("eagle3", page_size=64, num_pages=7), Shape(steps=1)
    texts = [(TEXT * 20)[:80], (TEXT[::-1] * 20)[:80]]
    subject.propose([told("eagle3", i, 0, text[:60], shape, GREEDY) for i, text in enumerate(texts)])
    taken = subject._books.open(())
    taken.reserve(4 * 64)
    found = subject.propose([told("eagle3", i, 60, text, shape, GREEDY) for i, text in enumerate(texts)])
    [loser] = [i for i, proposal in enumerate(found) if not proposal.tokens]
    [one] = subject.propose([told("eagle3", loser, 80, texts[loser], shape, GREEDY)])
    assert_same(one, Book("eagle3", GREEDY).turn(0, texts[loser], shape))


def test_survivors_in_the_way_of_the_text_move_with_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide trees whose paths are followed step by step, so that rows of what lives on lie everywhere."""
    subject, book, wide = drafter("eagle", page_size=1, budget=64), Book("eagle", GREEDY), Shape(4, 3, 4, 60)
    moved: list[int] = []
    move = subject.pool.move
    monkeypatch.setattr(subject.pool, "move", lambda *where: (moved.append(len(where[0])), move(*where)))
    text, came, followed = list(TEXT), (), []
    for _ in range(8):
        expected = book.turn(len(book.text), came or text, wide)
        [found] = subject.propose([told("eagle", 1, len(book.text) - len(came or text), book.text, wide, GREEDY)])
        assert_same(found, expected)
        came = max(book.tree.expanded, key=lambda path: (sum(p[:1] == path[:1] for p in book.tree.expanded), path))[:1]
        followed.append(len(came))
    assert max(moved) > max(followed)


def test_bad_rows_change_nothing() -> None:
    subject, shape = drafter("eagle"), Shape(steps=1)
    good = told("eagle", 2, 0, TEXT, shape, GREEDY)
    with pytest.raises(IllegalTransition):
        subject.propose([good, DraftRow(1, 3, (), shape, GREEDY)])
    for features_ in (None, torch.zeros(2, 48), torch.zeros(3, 47)):
        with pytest.raises(ValueError, match=r"request 1: features of shape .*\(3, 48\)"):
            subject.propose([good, DraftRow(1, 0, (1, 2, 3), shape, GREEDY, features_)])
    with pytest.raises(IllegalTransition):
        subject.propose([DraftRow(2, 1, (), shape, GREEDY)])


def test_forgetting_frees_the_pages() -> None:
    subject = drafter("eagle")
    free = subject._books.allocator.free
    subject.propose([told("eagle", 1, 0, TEXT, Shape(steps=2), GREEDY)])
    assert subject._books.allocator.free < free
    subject.forget(1)
    subject.forget(1)
    subject.check()
    assert subject._books.allocator.free == free


def test_a_pool_that_holds_no_request_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"engine\.num_pages"):
        drafter("eagle", num_pages=18)
    assert drafter("eagle", num_pages=19).max_model_len == 4
