"""A drafter with a model of its own: what it proposes depends on the text and on how its tree was grown, not on
pages, slots, batches or what was computed before."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, inf
from pathlib import Path as Folder

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from tokenizers import Tokenizer
from tokenizers.models import BPE

from distspec import drafters
from distspec.config import load
from distspec.drafters.base import Called, DraftRow, Loan, Proposal, never
from distspec.drafters.standalone import StandaloneDrafter, _Part
from distspec.engine import Engine, Guesses, Guessing, Outcome, Segment
from distspec.engine.acceptance import ACCEPTANCES
from distspec.errors import ConfigError, IllegalTransition
from distspec.models import load_model, random_model, save_pretrained
from distspec.protocol.messages import Progress
from distspec.protocol.values import SamplingParams, Shape
from distspec.sampling import SamplingRows, best
from distspec.synthetic import outcome
from tests.causal import logits
from tests.chain import END, WORDS, edited
from tests.desks import CPU, GREEDY, SEEDED, SHAPE, desk, engine, lease, model, run, stream
from tests.growth import Growth, Path, paths, shapes
from tests.spelling import letters

TEXT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3)
EDITED = SamplingParams(
    max_tokens=99,
    seed=4,
    prompt_tokens=9,
    stop_token_ids=(0,),
    min_tokens=6,
    allowed_token_ids=(0, 1, 2, 3, 5, 8, 9),
    logit_bias=((1, 1.0), (2, -1.0)),
    repetition_penalty=0.9,
    frequency_penalty=1.5,
)
NARROW = SamplingParams(max_tokens=99, seed=4, temperature=0.7, top_p=0.4, stop_token_ids=(0,))


def drafter(
    page_size: int = 4,
    num_pages: int | None = None,
    slots: int = 8,
    budget: int = 16,
    scratch: int = 64,
    is_called: Called = never,
) -> StandaloneDrafter:
    of = engine(page_size, num_pages, slots)
    return StandaloneDrafter(
        of,
        max_num_batched_tokens=budget,
        max_scratch_nodes=scratch,
        max_model_len=SHAPE.max_position,
        is_called=is_called,
    )


def chain(steps: int) -> Shape:
    return Shape(steps=steps)


@cache
def guesses(text: Path, params: SamplingParams) -> list[tuple[int, float]]:
    """All tokens as the model ranks them after `text`: one dense sequence, no pages, no cache, no batch."""
    rows = SamplingRows.of([params], [len(text)], CPU)
    scores = edited(logits(model(), list(text))[-1], text, params)
    found = (x[0].tolist() for x in best(scores[None], rows, SHAPE.vocab_size))
    return [guess for guess in zip(*found, strict=True) if guess[1] > -inf]


class Book:
    """What a drafter should propose for one request, by the book, and what it has to compute for that.

    rows: positions computed in the last turn. behind: last tokens of the text that no turn needed yet.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.text: Path = ()
        self.params = params
        self.growth = Growth(lambda path: guesses(self.text + path, params), params.stop_token_ids)
        self.behind = 0
        self.rows = 0

    def turn(self, keep: int, tokens: Sequence[int], shape: Shape) -> Proposal:
        known, self.text = self.text, (*self.text[:keep], *tokens)
        self.follow(self.text[len(known) :]) if self.text[: len(known)] == known else self.restart()
        shape = structs.replace(shape, depth=min(shape.depth, SHAPE.max_position - len(self.text)))
        grown = [path for _ in range(shape.steps) for path in self.growth.grow(shape)]
        self.rows = sum(path != () for path in grown)
        if grown:
            self.rows += self.behind
            self.behind = 0
        return self.growth.proposal()

    def follow(self, tail: Path) -> None:
        self.behind += sum(tail[:end] not in self.growth.expanded for end in range(1, len(tail) + 1))
        self.growth.follow(tail)

    def restart(self) -> None:
        self.growth.clear()
        self.behind = len(self.text)


def expected(text: Sequence[int], shape: Shape, params: SamplingParams = GREEDY) -> Proposal:
    return Book(params).turn(0, text, shape)


def assert_same(got: Proposal, want: Proposal) -> None:
    """The same tree; scores but for what another order of float sums makes of them."""
    assert (got.tokens, got.parents) == (want.tokens, want.parents)
    assert got.scores == pytest.approx(want.scores, abs=1e-4)


def propose(subject: StandaloneDrafter, *rows: DraftRow) -> list[Proposal]:
    """As propose; every page has its holders afterwards, and no text more than it may have."""
    proposals = subject.propose(rows)
    subject.check()
    page = subject._engine.page_size
    for text in subject._kept.by_request.values():
        if text.slot is None:
            assert len(text.tree) == 0
            continue
        held = subject._engine.sequence(text.slot)
        assert held.tokens == text.tokens[: len(text.tokens) - len(text.pending)]
        assert set(held.nodes) == text.computed
        assert all(held.token(id) == text.tree.token(id) for id in held.nodes)
        assert len(held.nodes) <= subject._room
        assert len(held.pages) <= ceil((len(text.tokens) + subject._room) / page)
    return proposals


@dataclass
class Counter:
    """Rows that an engine computes, but for those begun below what then turned out to be a stop token."""

    rows: int = 0

    def watch(self, subject: StandaloneDrafter) -> None:
        guess, take_back = subject._engine.guess, subject._take_back

        def counted(segments: Sequence[Segment], most: int, before: Guessing | None) -> object:
            self.rows += sum(len(segment.tokens) + len(segment.nodes) for segment in segments)
            return guess(segments, most, before)

        def taken_back(part: _Part) -> None:
            self.rows -= len(part.segment.nodes)
            take_back(part)

        subject._engine.guess = counted  # type: ignore[assignment, method-assign]
        subject._take_back = taken_back  # type: ignore[method-assign]

    def take(self) -> int:
        rows, self.rows = self.rows, 0
        return rows


@pytest.mark.parametrize("params", [GREEDY, SEEDED, NARROW, EDITED], ids=["greedy", "seeded", "narrow", "edited"])
@pytest.mark.parametrize("odds", [(), (0.6, 0.25, 0.1)], ids=["dynamic", "static"])
@pytest.mark.parametrize("topk", [1, 2, 3])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_equals_dense_growth_and_goes_on_from_every_node(
    params: SamplingParams, odds: tuple[float, ...], topk: int, width: int
) -> None:
    """Whichever node the text follows to, what is below it is kept and grows on; nothing of it is computed twice."""
    counter = Counter()
    subject = drafter()
    counter.watch(subject)
    for steps in (1, 2, 4):
        shape = Shape(steps=steps, topk=topk, width=width, nodes=20, odds=odds)
        ends = len(paths(expected(TEXT, shape, params)))
        for request in range(min(ends, 8)):
            book = Book(params)
            [first] = propose(subject, DraftRow(request, 0, TEXT, shape, params))
            assert_same(first, book.turn(0, TEXT, shape))
            counter.take()
            tail = paths(first)[request]
            [second] = propose(subject, DraftRow(request, len(TEXT), tail, shape, params))
            assert_same(second, book.turn(len(TEXT), tail, shape))
            assert counter.take() == book.rows
            subject.forget(request)


pieces = st.lists(st.integers(0, SHAPE.vocab_size - 1), max_size=4)
turns = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 8), st.integers(0, 20), pieces, shapes), max_size=10
)


@settings(max_examples=60)
@given(turns, st.sampled_from([1, 4, 16]), st.integers(1, 3), st.sampled_from([3, 16]))
def test_equals_dense_growth_whatever_came_before(
    turns: list[tuple[int, bool, int, int, list[int], Shape]], page_size: int, slots: int, budget: int
) -> None:
    """Three requests share few slots; texts are cut anywhere, follow earlier proposals, and go their own way."""
    subject, counter = drafter(page_size, slots=slots, budget=budget), Counter()
    counter.watch(subject)
    books = {request: Book(params) for request, params in enumerate((GREEDY, SEEDED, NARROW))}
    for request, follows, cut, pick, piece, shape in turns:
        book = books[request]
        ways = ((), *book.growth.found)
        keep = len(book.text) if follows else max(0, len(book.text) - cut)
        tokens = (*ways[pick % len(ways)], *piece) if follows else tuple(piece)
        tokens = tokens if keep or tokens else (1,)
        held = request in subject._kept.by_request and subject._kept.by_request[request].slot is not None
        goes_on = held and (*book.text[:keep], *tokens)[: len(book.text)] == book.text
        if not goes_on:
            book.restart()
        [proposal] = propose(subject, DraftRow(request, keep, tokens, shape, book.params))
        assert_same(proposal, book.turn(keep, tokens, shape))
        rows = counter.take()
        assert rows == book.rows if goes_on else rows <= book.rows
        if not goes_on:  # the prefix cache had some of it
            book.behind = len(subject._kept.by_request[request].pending)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("budget", [3, 5, 64])
def test_rows_of_a_batch_do_not_see_each_other(params: SamplingParams, budget: int) -> None:
    subject = drafter(budget=budget)
    texts = [TEXT, TEXT[:1], TEXT[::-1], TEXT[:7]]
    shapes = [Shape(steps=4 - i, topk=3 - i % 3, width=2) for i in range(4)]
    rows = [DraftRow(i, 0, text, shape, params) for i, (text, shape) in enumerate(zip(texts, shapes, strict=True))]
    for proposal, text, shape in zip(propose(subject, *rows), texts, shapes, strict=True):
        assert_same(proposal, expected(text, shape, params))


@pytest.mark.parametrize(("odds", "order"), [((0.6, 0.25), "bbrbrbrr"), ((), "brbrbrbr")], ids=["static", "dynamic"])
def test_steps_begin_before_the_last_one_is_read_where_odds_say_what_grows(odds: tuple[float, ...], order: str) -> None:
    subject, seen = drafter(), list[str]()
    guess = subject._engine.guess

    def watched(segments: Sequence[Segment], most: int, before: Guessing | None) -> Guessing:
        seen.append("b")
        begun = guess(segments, most, before)

        def read() -> list[Outcome[Guesses]]:
            seen.append("r")
            return begun.read()

        return replace(begun, read=read)

    subject._engine.guess = watched  # type: ignore[assignment, method-assign]
    propose(subject, DraftRow(1, 0, TEXT, Shape(steps=4, topk=2, width=2, odds=odds), SEEDED))
    assert "".join(seen) == order


def test_growing_in_slices_is_growing_at_once() -> None:
    sliced, whole = drafter(), drafter()
    shape = Shape(steps=6, topk=2, width=2)
    propose(sliced, DraftRow(1, 0, TEXT, structs.replace(shape, steps=0), SEEDED))
    for steps in (1, 3, 2):
        [last] = propose(sliced, DraftRow(1, len(TEXT), (), structs.replace(shape, steps=steps), SEEDED))
    assert [last] == propose(whole, DraftRow(1, 0, TEXT, shape, SEEDED))


@pytest.mark.parametrize("odds", [(), (0.6, 0.25, 0.1)], ids=["dynamic", "static"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED, NARROW, EDITED], ids=["greedy", "seeded", "narrow", "edited"])
@pytest.mark.parametrize("often", [0.0, 0.5, 1.0])
def test_who_is_called_away_goes_on_later_and_computes_nothing_twice(
    odds: tuple[float, ...], params: SamplingParams, often: float
) -> None:
    dice, counter, book, rows = random.Random(5), Counter(), Book(params), 0
    subject = drafter(budget=8, is_called=lambda: dice.random() < often)
    counter.watch(subject)
    shape, found = Shape(steps=5, topk=2, width=3, odds=odds), Proposal((), ())
    text: Path = ()
    for _ in range(4):
        told, left, turns = len(text), shape.steps, 0
        tail = max(paths(found), key=len)[:2] if text else TEXT
        text = (*text, *tail)
        while left or not turns:
            row = DraftRow(1, told, text[told:], structs.replace(shape, steps=left), params)
            [found] = propose(subject, row)
            assert not (found.left and found.tokens)
            told, left, turns = len(text), found.left, turns + 1
        assert_same(found, book.turn(len(text) - len(tail), tail, shape))
        rows += book.rows
        assert turns == 1 if not often else turns <= (6 if odds else 7)
    assert counter.rows == rows


@pytest.mark.parametrize(("odds", "most"), [((), 1), ((0.6, 0.25, 0.1), 2)], ids=["dynamic", "static"])
def test_who_is_called_away_begins_no_forward_more(odds: tuple[float, ...], most: int) -> None:
    """What was launched before the call is waited for."""
    calls = iter([False, False, True])
    subject, forwards = drafter(is_called=lambda: next(calls)), Counter()
    forwards.watch(subject)
    shape = Shape(steps=9, topk=1, odds=odds)
    [found] = propose(subject, DraftRow(1, 0, TEXT, shape, GREEDY))
    assert found == Proposal((), (), left=9 - 2 - most)
    assert forwards.take() == len(TEXT) + 1 + most


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("scratch", [3, 64])
def test_books_balance_and_scratch_room_is_kept(page_size: int, topk: int, scratch: int) -> None:
    """Texts follow, leave, start again and end, over a pool for about half of them; `propose` proves the books."""
    dice = random.Random(page_size * 1000 + topk)
    subject = drafter(page_size, num_pages=max(3, 120 // page_size), slots=3, scratch=scratch)
    free = subject._engine.books.allocator.free
    texts: dict[int, Path] = {}
    ways: dict[int, list[Path]] = {}
    drafted = 0
    for _ in range(30):
        rows = []
        for request in dice.sample(range(5), dice.randint(1, 3)):
            if dice.random() < 0.1 or len(texts.get(request, ())) > 50:
                subject.forget(request)
                texts.pop(request, None)
            text, way = texts.get(request, ()), dice.choice(ways.get(request) or [()])
            tokens = tuple(dice.choices(range(11), k=dice.randint(1, 9))) if dice.random() < 0.4 or not text else way
            shape = Shape(steps=dice.randint(0, 4), topk=topk, width=dice.randint(1, 4), nodes=dice.randint(1, 40))
            rows.append(DraftRow(request, len(text), tokens, shape, SEEDED))
            texts[request] = text + tokens
        for row, proposal in zip(rows, propose(subject, *rows), strict=True):
            ways[row.request] = paths(proposal)
            drafted += len(proposal.tokens)
    assert drafted > 30 * topk
    for request in range(5):
        subject.forget(request)
    subject.check()
    cache = subject._engine.books.cache
    assert cache is not None
    assert subject._engine.books.allocator.free + len(list(cache.pages)) >= free


def test_without_scratch_room_the_tree_stops_growing_and_goes_on_when_there_is_some() -> None:
    subject = drafter(scratch=2)
    [first] = propose(subject, DraftRow(1, 0, TEXT, chain(8), GREEDY))
    assert_same(first, expected(TEXT, chain(3)))  # the text's end needs no scratch, two nodes do
    [second] = propose(subject, DraftRow(1, len(TEXT), first.tokens[:1], chain(8), GREEDY))
    assert_same(second, expected((*TEXT, first.tokens[0]), chain(3)))


@pytest.mark.parametrize("room", [0, 1, 3])
def test_nothing_reaches_past_max_model_len(room: int) -> None:
    text, counter = TEXT * 15, Counter()
    subject = StandaloneDrafter(
        engine(), max_num_batched_tokens=64, max_scratch_nodes=64, max_model_len=len(text) + room
    )
    counter.watch(subject)
    [proposal] = propose(subject, DraftRow(1, 0, text, Shape(steps=8, topk=2, width=3), GREEDY))
    assert_same(proposal, expected(text, Shape(steps=8, topk=2, width=3, depth=room)))
    assert max(map(len, paths(proposal)), default=0) == room
    if not room:
        assert counter.take() == 0  # nothing can come of it


def test_a_text_longer_than_the_drafters_model_gets_no_draft_and_harms_no_other() -> None:
    subject = StandaloneDrafter(engine(), max_num_batched_tokens=64, max_scratch_nodes=64, max_model_len=10_000)
    long = (1,) * (SHAPE.max_position + 1)
    first, second = propose(subject, DraftRow(1, 0, long, chain(2), GREEDY), DraftRow(2, 0, TEXT, chain(2), GREEDY))
    assert first == Proposal((), ())
    assert_same(second, expected(TEXT, chain(2)))
    [cut] = propose(subject, DraftRow(1, 5, (), chain(2), GREEDY))
    assert_same(cut, expected((1,) * 5, chain(2)))


@pytest.mark.parametrize("none", [{"depth": 0}, {"nodes": 0}, {"width": 0}, {"steps": 0}])
def test_a_shape_that_leaves_no_room_is_no_obstacle_to_the_next(none: dict[str, int]) -> None:
    subject = drafter()
    shape = Shape(steps=3, topk=2, width=2)
    [nothing] = propose(subject, DraftRow(1, 0, TEXT, structs.replace(shape, **none), GREEDY))
    assert nothing == Proposal((), ())
    [proposal] = propose(subject, DraftRow(1, len(TEXT), (), shape, GREEDY))
    assert_same(proposal, expected(TEXT, shape))


def test_more_guesses_than_there_are_tokens_are_all_tokens() -> None:
    shape = Shape(steps=1, topk=SHAPE.vocab_size + 1)
    [proposal] = propose(drafter(), DraftRow(1, 0, TEXT, shape, NARROW))
    assert_same(proposal, expected(TEXT, shape, NARROW))
    assert sorted(proposal.tokens) == list(range(SHAPE.vocab_size))


def test_nothing_hangs_below_a_stop_token() -> None:
    shape = Shape(steps=6, topk=3, width=3)
    likely = guesses(TEXT, GREEDY)[0][0]
    params = structs.replace(GREEDY, stop_token_ids=(likely,))
    [proposal] = propose(drafter(), DraftRow(1, 0, TEXT, shape, params))
    assert_same(proposal, expected(TEXT, shape, params))
    assert any(path[-1] == likely for path in paths(proposal))
    assert all(likely not in path[:-1] for path in paths(proposal))


def test_a_row_without_slot_or_pages_gets_no_draft_and_gets_one_later() -> None:
    rows = [DraftRow(1, 0, TEXT, chain(2), GREEDY), DraftRow(2, 0, TEXT[::-1], chain(2), GREEDY)]
    for subject in (drafter(slots=1), drafter(num_pages=5)):
        first, second = propose(subject, *rows)
        assert_same(first, expected(TEXT, chain(2)))
        assert second == Proposal((), ())
        [second] = propose(subject, DraftRow(2, len(TEXT), (), chain(2), GREEDY))
        assert_same(second, expected(TEXT[::-1], chain(2)))
        [first] = propose(subject, DraftRow(1, len(TEXT), (), chain(2), GREEDY))
        assert_same(first, expected(TEXT, chain(2)))


def test_keeping_more_than_there_is_changes_nothing() -> None:
    subject = drafter()
    with pytest.raises(IllegalTransition):
        subject.propose([DraftRow(2, 0, TEXT, chain(2), GREEDY), DraftRow(1, 3, (), chain(2), GREEDY)])
    with pytest.raises(IllegalTransition):
        subject.propose([DraftRow(2, 1, (), chain(2), GREEDY)])


def test_forgetting_frees_the_slot() -> None:
    subject = drafter(slots=1)
    for request in range(3):
        propose(subject, DraftRow(request, 0, TEXT, chain(2), GREEDY))
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
        return drafters.make(config, drafters.draft_model(config, device=CPU), max_model_len=64, device=CPU)

    assert made(drafter="none", policy="ar") is None
    assert isinstance(made(drafter="ngram"), drafters.NgramDrafter)
    alone = made(drafter="standalone", draft_model=folder)
    assert alone is not None
    [proposal] = alone.propose([DraftRow(1, 0, TEXT, chain(3), SEEDED)])
    assert_same(proposal, expected(TEXT, chain(3), SEEDED))
    sure = made(drafter="standalone", draft_model=folder, synthetic_acceptance=[1.0])
    assert sure is not None
    [proposal] = sure.propose([DraftRow(1, 0, TEXT, chain(1), SEEDED)])
    assert proposal.tokens == (outcome(SEEDED.seed, 0, len(TEXT), TEXT[-1], SHAPE.vocab_size),)


def test_a_drafter_of_another_vocabulary_is_refused(tmp_path: object) -> None:
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
        drafters.draft_model(config, device=CPU)


@pytest.mark.parametrize("acceptance", ["coupled", "ratio"])
def test_a_drafter_of_fewer_ids_takes_any_request_of_its_target(acceptance: str, tmp_path: Folder) -> None:
    """Checkpoints of a family pad their embeddings to different sizes, and clients may name any id of the target."""
    grammars, asked = letters(), structs.replace(SEEDED, prompt_tokens=3, stop_token_ids=(END,))
    for name, vocab in (("target", 96), ("small", 60)):
        of = random_model(replace(SHAPE, vocab_size=vocab), seed=0, dtype=torch.float32, device=CPU)
        save_pretrained(of, tmp_path / name)
        Tokenizer(BPE(vocab={"a": 0}, merges=[])).save(str(tmp_path / name / "tokenizer.json"))
    names = {"drafter": "standalone", "draft_model": str(tmp_path / "small"), "acceptance": acceptance}
    config = load(
        {
            "model": {"name": str(tmp_path / "target")},
            "engine": {"num_pages": 100},
            "speculation": {"placement": "local", "policy": "sd", "allowed_policies": ["ar", "sd"], **names},
        }
    )
    target = load_model(str(tmp_path / "target"), dtype=torch.float32, device=CPU)
    local = drafters.make(
        config, drafters.draft_model(config, device=CPU), max_model_len=100, device=CPU, grammars=grammars
    )
    judging = Engine(
        target, config.engine, device=CPU, max_model_len=100, acceptance=ACCEPTANCES[acceptance], grammars=grammars
    )
    subject = desk(judging, local, overlap=True)
    wishes = [asked, structs.replace(asked, logit_bias=((90, 100.0),))]
    wishes += [structs.replace(asked, constraint=constraint) for constraint in WORDS]
    for request, wish in enumerate(wishes):
        subject.receive(lease(request, (1, 80, 3), wish, 3))
    replies = run(subject)
    assert {type(reply) for reply in replies} == {Progress}
    assert stream(replies, 1)[:3] == [90, 90, 90]
    for request, words in enumerate(WORDS.values(), 2):
        assert "".join(chr(32 + token) for token in stream(replies, request) if token != END) in words


# -- loans -----------------------------------------------------------------------------------------------


def lend(subject: StandaloneDrafter, *rows: DraftRow) -> list[Loan]:
    found = subject.lend(rows)
    assert all(found)
    return [loan for loan in found if loan is not None]


@given(st.integers(0, 5), st.lists(st.integers(0, SHAPE.vocab_size - 1), max_size=6), st.sampled_from([1, 4, 16]))
def test_a_lent_text_is_computed_but_for_two_tokens_and_without_its_tree(
    grown: int, tail: list[int], page_size: int
) -> None:
    """Whatever was drafted before; and what is lent and given back again is as if nothing had been."""
    subject = drafter(page_size, budget=5)
    if grown:
        subject.propose([DraftRow(1, 0, TEXT, Shape(steps=grown, topk=2, width=2), GREEDY)])
    text = (*TEXT, *tail)
    keep = len(TEXT) if grown else 0
    [loan] = lend(subject, DraftRow(1, keep, text[keep:], chain(3), GREEDY))
    assert loan.slot is not None
    sequence = subject.engine.sequence(loan.slot)
    assert not sequence.nodes
    assert len(text) - 2 <= sequence.length < len(text)
    assert sequence.tokens == list(text[: sequence.length])
    subject.check()
    loan.close()
    [got] = subject.propose([DraftRow(1, len(text), (), chain(2), GREEDY)])
    assert_same(got, expected(text, chain(2)))


def test_nothing_is_proposed_for_a_text_that_is_lent() -> None:
    subject = drafter()
    [loan] = lend(subject, DraftRow(1, 0, TEXT, chain(1), GREEDY))
    for ask in (subject.propose, subject.lend):
        with pytest.raises(IllegalTransition, match="request 1: its slot is lent"):
            ask([DraftRow(2, 0, TEXT, chain(1), GREEDY), DraftRow(1, len(TEXT), (), chain(1), GREEDY)])
    loan.close()
    assert_same(subject.propose([DraftRow(1, len(TEXT), (), chain(1), GREEDY)])[0], expected(TEXT, chain(1)))


def test_a_loan_outlives_its_request_and_frees_its_pages_when_it_is_closed() -> None:
    subject = drafter(slots=1)
    [loan] = lend(subject, DraftRow(1, 0, TEXT, chain(1), GREEDY))
    subject.forget(1)
    assert subject.lend([DraftRow(1, 0, TEXT, chain(1), GREEDY)]) == [None], "the one slot is lent"
    loan.close()
    assert not subject.engine._open
    subject.check()
    [again] = lend(subject, DraftRow(1, len(TEXT), (), chain(1), GREEDY))
    again.close()


def test_idle_texts_give_way_to_what_a_loan_holds_and_lent_ones_never() -> None:
    """Pages for three texts and a little: one is idle, two are lent, the first of which grows."""
    subject = drafter(page_size=1, num_pages=3 * len(TEXT) + 4)
    subject.propose([DraftRow(3, 0, TEXT[::-1], chain(1), GREEDY)])
    one, _ = lend(subject, DraftRow(1, 0, TEXT, chain(1), GREEDY), DraftRow(2, 0, (9, *TEXT), chain(1), GREEDY))
    assert one.hold(len(TEXT) + 8)
    assert not one.hold(3 * len(TEXT)), "the other is lent"
    assert not one.hold(SHAPE.max_position + 1), "no text is so long"
    one.follow((5, 6), len(TEXT) + 2)
    assert one.slot is not None
    assert subject.engine.sequence(one.slot).tokens == list(TEXT)
    assert len(subject.engine.sequence(one.slot).pages) == len(TEXT) + 2
    subject.check()
