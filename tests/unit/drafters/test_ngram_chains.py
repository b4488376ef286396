"""Prompt lookup inside rounds: the tokens of plain steps, and the drafts of the drafter that proposes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from distspec.config import Ngram
from distspec.drafters.base import DraftRow
from distspec.drafters.ngram import NgramDrafter
from distspec.drafters.ngram_chains import NgramChains
from distspec.engine import Engine, Rolling
from distspec.engine.rolling import Kind, State
from distspec.protocol.values import Constraint, SamplingParams, Shape
from tests.chain import END
from tests.rolling import Books, plain
from tests.unit.engine.rolling.test_rolling import MODEL, engine, random_params
from tests.unit.engine.rolling.test_staged import MODEL as LETTERED
from tests.unit.engine.rolling.test_staged import asking
from tests.unit.engine.rolling.test_staged import engine as lettered

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def check_rounds(draw: random.Random, make: Callable[[], Engine], asks: Callable[[list[int]], SamplingParams]) -> None:
    """Three texts, in rounds of any of them, of any length, read later. make: their engine, and another one."""
    target = make()
    here = Books(target, None, Rolling(target, partial(NgramChains, Ngram())))
    prompts = [[draw.randrange(5) for _ in range(draw.randint(1, 30))] for _ in range(3)]
    params = [asks(prompt) for prompt in prompts]
    texts = [here.enter(*pair) for pair in zip(prompts, params, strict=True)]
    for _ in range(10):
        here.launch(draw.sample(range(3), draw.randint(1, 3)), draw.randint(0, 4))
        while len(here.flights) > draw.randint(0, 2):
            here.read()
    for text, prompt, one in zip(texts, prompts, params, strict=True):
        found = here.leave(text)
        assert found == plain(make(), prompt, one, len(found))


@settings(max_examples=8)
@given(st.integers(0, 2**32))
def test_tokens_are_those_of_plain_steps(seed: int) -> None:
    draw = random.Random(seed)
    check_rounds(draw, lambda: engine(MODEL), lambda prompt: random_params(draw))


@settings(max_examples=15)
@given(st.integers(0, 2**32))
def test_tokens_are_those_of_plain_steps_whatever_is_asked(seed: int) -> None:
    draw = random.Random(seed)
    check_rounds(draw, lambda: lettered(LETTERED), lambda prompt: asking(draw, prompt))


def test_what_a_grammar_forces_is_drafted() -> None:
    """Nothing of the text could tell; a grammar without any choice is followed as fast as rounds are long."""
    target, words = lettered(LETTERED), "the only words there are"
    constraint = Constraint(kind="regex", text=words)
    here = Books(target, None, Rolling(target, partial(NgramChains, Ngram())))
    text = here.enter([5, 6], replace(GREEDY, prompt_tokens=2, constraint=constraint, stop_token_ids=(END,)))
    for _ in range(4):
        here.launch([0], 4)
    assert "".join(chr(32 + token) for token in here.leave(text)) == words[: 1 + 4 * 5]


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_drafts_are_those_that_are_proposed(seed: int, steps: int) -> None:
    """Where there is something to propose. The text grows by what a round says, as far as its length says."""
    draw = random.Random(seed)
    state, host = State(engine(MODEL), None), NgramDrafter(Ngram(), max_model_len=500)
    chains, text = NgramChains(Ngram(), state, 500), [draw.randrange(4) for _ in range(draw.randint(2, 40))]
    chains.enter(1, text)
    state.enter(1, len(text), (text[-2], text[-1]), GREEDY)
    slots = torch.tensor([1])
    for _ in range(4):
        drafts = chains.draft(slots, state.last[slots], steps, Kind.of([GREEDY]))
        host.forget(0)  # else its tree goes on where the last one ended
        [want] = host.propose([DraftRow(0, 0, tuple(text), Shape(steps=steps), GREEDY)])
        if want.tokens:
            assert [int(tokens) for tokens in drafts] == list(want.tokens)
        outcomes = [draw.randrange(4) for _ in range(steps + 1)]
        chains.follow(slots, torch.tensor([outcomes]))
        accepted = draw.randint(0, steps)
        text += outcomes[: accepted + 1]
        state.lengths[1] += accepted + 1


def test_a_text_that_was_lent_is_known_when_it_comes_back() -> None:
    lent, told = (NgramDrafter(Ngram(), max_model_len=100) for _ in range(2))
    shape = Shape(steps=3)
    for drafter in (lent, told):
        drafter.propose([DraftRow(0, 0, (1, 2, 3, 1, 2), shape, GREEDY)])
    [loan] = lent.lend([DraftRow(0, 4, (2, 4), shape, GREEDY)])
    assert loan is not None
    assert (loan.slot, loan.hold(100), loan.hold(101)) == (None, True, False)
    loan.follow((7, 1), 20)
    loan.follow((2,), 20)
    loan.close()
    text = (1, 2, 3, 1, 2, 4, 7, 1, 2)
    assert lent.propose([DraftRow(0, 9, (), shape, GREEDY)]) == told.propose([DraftRow(0, 0, text, shape, GREEDY)])
    [loan] = lent.lend([DraftRow(0, 9, (), shape, GREEDY)])
    assert loan is not None
    lent.forget(0)
    loan.follow((5,), 20)
    loan.close()
    assert lent.propose([DraftRow(0, 0, (5,), shape, GREEDY)])[0].tokens == ()
