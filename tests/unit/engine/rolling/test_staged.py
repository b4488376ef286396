"""Rounds in which the host has a part give the tokens of plain steps, and tell of them what these tell."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from distspec import config
from distspec.engine import Engine, Rolling
from distspec.models import prefix_layers, random_model
from distspec.models.llama import Llama
from distspec.protocol.values import Constraint, SamplingParams, TokenLogprobs
from tests.chain import END, WORDS, wish
from tests.rolling import Books, Text, told
from tests.shapes import TINY
from tests.spelling import letters
from tests.unit.engine.rolling.test_rolling import random_params

CPU = torch.device("cpu")
SHAPE = dataclasses.replace(TINY, vocab_size=96)
MODEL = random_model(SHAPE, seed=3, dtype=torch.float32, device=CPU)
DRAFTERS = {"none": None, "itself": MODEL, "its first layer": prefix_layers(MODEL, 1)}


def engine(model: Llama, mode: str = "raw_logprobs") -> Engine:
    options = config.Engine(num_pages=400, page_size=4, max_num_seqs=4, logprobs_mode=mode)  # type: ignore[arg-type]
    return Engine(model, options, device=CPU, grammars=letters())


def books(drafter: str, mode: str = "raw_logprobs") -> Books:
    model, target = DRAFTERS[drafter], engine(MODEL, mode)
    draft = engine(model) if model is not None else None
    return Books(target, draft, Rolling(target, draft))


def asking(draw: random.Random, prompt: Sequence[int]) -> SamplingParams:
    """Any parameters: some of what no host needs to know, some of all else."""
    params = replace(random_params(draw), max_tokens=40, prompt_tokens=len(prompt), stop_token_ids=(END,))
    if draw.random() < 0.7:
        params = wish(draw, params, SHAPE.vocab_size)
    if draw.random() < 0.3:
        params = replace(params, constraint=draw.choice(list(WORDS)))
    return replace(params, logprobs=draw.choice([None, None, 0, 3]), max_tokens=1)


def alike(mine: Sequence[TokenLogprobs], others: Sequence[TokenLogprobs]) -> None:
    for one, other in zip(mine, others, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [p for _, p in one.top] == pytest.approx([p for _, p in other.top], abs=1e-4)


def check(here: Books, text: Text, prompt: Sequence[int], params: SamplingParams, reference: Engine) -> None:
    found = here.leave(text)
    tokens, said = told(reference, prompt, params, len(found))
    assert found == tokens
    alike(text.said, said[1:])  # the first token was a step's


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(list(DRAFTERS)), st.sampled_from(["raw_logprobs", "processed_logprobs"]))
def test_rows_get_the_tokens_of_plain_steps_whatever_they_ask_for(seed: int, drafter: str, mode: str) -> None:
    draw = random.Random(seed)
    here, reference = books(drafter, mode), engine(MODEL, mode)
    running: list[tuple[Text, list[int], SamplingParams]] = []
    for _ in range(16):
        if len(running) < 4 and draw.random() < 0.5:
            prompt = [draw.randrange(96) for _ in range(draw.randint(1, 30))]
            params = asking(draw, prompt)
            running.append((here.enter(prompt, params), prompt, params))
        if running and draw.random() < 0.15:
            check(here, *running.pop(draw.randrange(len(running))), reference)
        slots = draw.sample(sorted(here.texts), draw.randint(0, len(here.texts)))
        if slots:
            here.launch(slots, draw.randint(0, 4) if drafter != "none" else 0)
        while len(here.flights) > draw.randint(0, 2):
            here.read()
    for one in running:
        check(here, *one, reference)
    here.target.check()


def test_whole_rounds_may_run_between_the_parts_of_another() -> None:
    here, prompts = books("itself"), ([5, 6, 7], [8, 9])
    params = [SamplingParams(max_tokens=1, temperature=0.0, prompt_tokens=3, frequency_penalty=1.0, logprobs=2)]
    params.append(SamplingParams(max_tokens=1, seed=4))
    texts = [here.enter(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    for _ in range(6):
        for slot in (0, 1):
            here._reserve(here.target, slot, slot, 2)
            here._reserve(here.drafter, slot, slot, 2)  # type: ignore[arg-type]
        begun = here.rolling.begin([0], 2)
        other = here.rolling.launch([1], 2)
        while here.flights:
            here.read()
        here.flights += [here.rolling.finish(begun, [0]), other]
    for text, prompt, one in zip(texts, prompts, params, strict=True):
        check(here, text, prompt, one, engine(MODEL))


@pytest.mark.parametrize("constraint", [None, *WORDS])
def test_drafts_are_edited_as_what_judges_them(constraint: Constraint | None) -> None:
    """So a drafter that is the target itself is always right, once its own text is past the prompt."""
    here = books("itself")
    params = SamplingParams(
        max_tokens=1,
        seed=3,
        prompt_tokens=2,
        frequency_penalty=1.5,
        repetition_penalty=0.7,
        logit_bias=((7, 4.0),),
        bad_words=((7, 8), (9,)),
        stop_token_ids=(END,),
        constraint=constraint,
    )
    text = here.enter([5, 6], params)
    here.launch([0], 3)
    here.launch([0], 3)
    here.read()
    for _ in range(4):
        known = len(text.tokens)
        here.launch([0], 3)
        here.read()
        assert len(text.tokens) == known + 4
    check(here, text, [5, 6], params, engine(MODEL))


def test_a_text_that_has_ended_is_not_edited() -> None:
    """What its last round brings is nobody's; others in it get their own."""
    here = books("none")
    constraint = replace(SamplingParams(max_tokens=1, prompt_tokens=2), constraint=next(iter(WORDS)))
    texts = [here.enter([1, 2], replace(constraint, seed=seed)) for seed in (1, 2)]
    for slot in (0, 1):
        here._reserve(here.target, slot, slot, 0)
    asked: list[int] = []
    edit = here.target.edit
    here.target.edit = lambda logits, some: asked.extend(a.slot for a in some) or edit(logits, some)  # type: ignore
    here.flights.append(here.rolling.finish(here.rolling.begin([0, 1], 0), [1]))
    assert asked == [1]
    check(here, texts[1], [1, 2], replace(constraint, seed=2), engine(MODEL))
