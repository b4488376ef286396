"""Rounds on a GPU in which the host has a part: the tokens of a CPU's plain steps, and no wait but for the drafts."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from msgspec.structs import replace as changed

from distspec import config
from distspec.bench.trace import Trace
from distspec.config import Ngram
from distspec.drafters.ngram_chains import NgramChains
from distspec.engine import Engine, Rolling
from distspec.models import prefix_layers, random_model
from distspec.models.llama import Llama
from distspec.protocol.values import SamplingParams
from tests.chain import END, WORDS
from tests.rolling import Books, Text, plain, told
from tests.spelling import letters
from tests.unit.engine.rolling.test_staged import SHAPE, asking

pytestmark = pytest.mark.needs("gpu")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EVERYTHING = SamplingParams(
    max_tokens=1,
    seed=7,
    top_p=0.9,
    min_p=0.01,
    prompt_tokens=3,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias=((7, 1.0),),
    bad_words=((7, 8), (9,)),
    stop_token_ids=(END,),
    constraint=next(iter(WORDS)),
    logprobs=5,
)


def model(device: torch.device) -> Llama:
    return random_model(SHAPE, seed=3, dtype=torch.float32, device=device)


def engine(of: Llama, device: torch.device, **options: object) -> Engine:
    chosen = config.Engine(**{"page_size": 4, "num_pages": 400, "max_num_seqs": 4, "max_scratch_nodes": 8, **options})
    return Engine(of, chosen, device=device, grammars=letters())


def books(target: Llama, drafter: Llama | str | None, **options: object) -> Books:
    own = engine(target, CUDA, **options)
    if drafter == "ngram":
        return Books(own, None, Rolling(own, partial(NgramChains, Ngram())))
    draft = engine(drafter, CUDA, **options) if isinstance(drafter, Llama) else None
    return Books(own, draft, Rolling(own, draft))


def play(here: Books, seed: int, turns: int) -> list[tuple[list[int], SamplingParams, list[int], Text]]:
    """Texts that come, roll and go; of each its prompt, parameters, tokens and itself."""
    draw, done = random.Random(seed), []
    running: list[tuple[Text, list[int], SamplingParams]] = []
    for turn in range(turns):
        if len(running) < here.target.slots and draw.random() < 0.5:
            prompt = [draw.randrange(96) for _ in range(draw.randint(1, 30))]
            params = asking(draw, prompt)
            running.append((here.enter(prompt, params), prompt, params))
        while running and (turn == turns - 1 or draw.random() < 0.1 or len(running[0][0].tokens) > 200):
            text, prompt, params = running.pop(0)
            done.append((prompt, params, here.leave(text), text))
        if slots := draw.sample(sorted(here.texts), draw.randint(0, len(here.texts))):
            here.launch(slots, draw.randint(1, 3) if here.rolling.can(1) else 0)
        while len(here.flights) > draw.randint(0, 2):
            here.read()
    return done


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("drafter", ["none", "ngram", "itself", "its first layer"])
def test_tokens_and_logprobs_are_those_of_plain_steps_on_a_cpu(drafter: str, cuda_graphs: bool) -> None:
    target = model(CUDA)
    drafters = {"none": None, "ngram": "ngram", "itself": target, "its first layer": prefix_layers(target, 1)}
    here = books(target, drafters[drafter], cuda_graphs=cuda_graphs)
    reference = engine(model(CPU), CPU)
    for prompt, params, found, text in play(here, len(drafter), 40):
        tokens, said = told(reference, prompt, params, len(found))
        assert found == tokens
        assert [one.logprob for one in text.said] == pytest.approx([one.logprob for one in said[1:]], abs=1e-3)
    here.target.check()
    assert here.target.books.allocator.free == 400


@pytest.mark.parametrize("layers", [0, 1])
def test_nothing_waits_for_the_device_but_for_what_it_sends(layers: int) -> None:
    target = model(CUDA)
    here = books(target, prefix_layers(target, 1) if layers else None)
    asked = [([1, 2, 3], EVERYTHING), ([4, 5, 6], changed(EVERYTHING, constraint=None))]
    texts = [here.enter(*one) for one in asked]
    for repeat in range(2):  # the first compiles and captures
        torch.cuda.set_sync_debug_mode("error" if repeat else "default")
        try:
            for _ in range(6):
                here.launch([0, 1], 3 * layers)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for text, (prompt, params) in zip(texts, asked, strict=True):
        found = here.leave(text)
        assert found == plain(engine(model(CPU), CPU), prompt, params, len(found))


def test_many_rounds_leak_nothing() -> None:
    target = model(CUDA)
    here = books(target, prefix_layers(target, 1))
    play(here, 1, 400)  # all graphs are captured, and tables as large as they get
    gc.collect()  # what only a cycle holds is no leak, and may be counted before and not behind
    before = torch.cuda.memory_allocated()
    play(here, 1, 400)
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    for own in filter(None, (here.target, here.drafter)):
        own.check()
        assert own.books.allocator.free == 400


def test_each_forward_is_launched_before_the_last_one_ends() -> None:
    """With a model that is large enough for its forwards to take longer than the host's part, 2.8 ms on a slow one."""
    shape = replace(SHAPE, num_layers=36, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128)
    target = random_model(
        replace(shape, intermediate_size=16384), seed=3, dtype=torch.bfloat16, device=CUDA, drawn_on=CUDA
    )
    here = books(target, None)
    here.enter([1, 2, 3], changed(EVERYTHING, min_tokens=100))
    for _ in range(4):
        here.launch([0], 0)
    with Trace() as trace:
        for _ in range(20):
            here.launch([0], 0)
    ahead = trace.launched_ahead()
    assert len(ahead) == 19
    assert all(ahead)
