"""Rounds on a GPU: the tokens of a CPU's plain steps, without a wait for the device, and in one graph each."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from distspec import config
from distspec.attention.triton import TritonBackend
from distspec.bench.trace import Trace
from distspec.config import Ngram
from distspec.drafters.ngram import NgramDrafter
from distspec.drafters.ngram_chains import NgramChains
from distspec.engine import Engine, Rolling
from distspec.models import prefix_layers, random_model
from distspec.models.llama import Llama
from distspec.protocol.values import SamplingParams
from tests.rolling import Books, Text, plain
from tests.shapes import TINY
from tests.unit.attention.test_chains import check_chains
from tests.unit.engine.rolling.test_rolling import random_params
from tests.unit.kernels.test_rolling import check_make_up, check_settle, check_spread

pytestmark = pytest.mark.needs("gpu")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def model(device: torch.device, dtype: torch.dtype = torch.float32) -> Llama:
    return random_model(TINY, seed=3, dtype=dtype, device=device)


def books(target: Llama, drafter: Llama | None, **options: object) -> Books:
    chosen = config.Engine(**{"page_size": 4, "num_pages": 400, "max_num_seqs": 4, "max_scratch_nodes": 8, **options})
    engines = [Engine(one, chosen, device=CUDA) if one is not None else None for one in (target, drafter)]
    assert engines[0] is not None
    return Books(engines[0], engines[1], Rolling(engines[0], engines[1]))


def played(here: Books, seed: int, turns: int, steps: int) -> Iterator[tuple[Text, list[int], SamplingParams]]:
    """Texts that come, roll and go, two flights at most ahead of what is read; each when it leaves. steps: at most."""
    draw = random.Random(seed)
    running: list[tuple[Text, list[int], SamplingParams]] = []
    for turn in range(turns):
        if len(running) < here.target.slots and draw.random() < 0.4:
            prompt, params = [draw.randrange(97) for _ in range(draw.randint(1, 30))], random_params(draw)
            running.append((here.enter(prompt, params), prompt, params))
        if running and (draw.random() < 0.15 or turn == turns - 1 or len(running[0][0].tokens) > 200):
            yield running.pop(0)
        if slots := draw.sample(sorted(here.texts), draw.randint(0, len(here.texts))):
            here.launch(slots, draw.randint(1, steps) if here.drafter is not None else 0)
        while len(here.flights) > draw.randint(0, 2):
            here.read()
    yield from running


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_tokens_are_those_of_plain_steps_on_a_cpu(layers: int, cuda_graphs: bool) -> None:
    target = model(CUDA)
    here = books(target, prefix_layers(target, layers) if layers else None, cuda_graphs=cuda_graphs)
    reference = Engine(model(CPU), config.Engine(page_size=4, num_pages=400), device=CPU)
    for text, prompt, params in played(here, layers, 60, 4):
        found = here.leave(text)
        assert found == plain(reference, prompt, params, len(found))
    here.target.check()
    assert here.target.books.allocator.free == 400


def test_prompt_lookup_rolls_too() -> None:
    engine = Engine(model(CUDA), config.Engine(page_size=4, num_pages=400, max_num_seqs=4), device=CUDA)
    lender = NgramDrafter(Ngram(), max_model_len=500, device=CUDA).lender
    assert lender is not None
    here = Books(engine, None, Rolling(engine, lender.engine))
    reference = Engine(model(CPU), config.Engine(page_size=4, num_pages=400), device=CPU)
    draw = random.Random(0)
    prompts = [[draw.randrange(3) for _ in range(draw.randint(1, 30))] for _ in range(3)]
    texts = [here.enter(prompt, GREEDY) for prompt in prompts]
    for _ in range(20):
        here.launch(draw.sample(range(3), draw.randint(1, 3)), 3)
        while len(here.flights) > 1:
            here.read()
    for text, prompt in zip(texts, prompts, strict=True):
        found = here.leave(text)
        assert found == plain(reference, prompt, GREEDY, len(found))


@pytest.mark.parametrize("drafter", ["engine", "ngram"])
def test_nothing_waits_for_the_device(drafter: str) -> None:
    target = model(CUDA)
    here = books(target, prefix_layers(target, 1))
    if drafter == "ngram":
        here.rolling, here.drafter = Rolling(here.target, partial(NgramChains, Ngram())), None
    for prompt in ([1, 2, 3], [4, 5]):
        here.enter(prompt, GREEDY)
    here.rolling.prepare(3)
    here.launch([0, 1], 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            here.launch([0, 1], 3)
            here.read()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_thousands_of_rounds_leak_nothing() -> None:
    target = model(CUDA, torch.bfloat16)
    here = books(target, prefix_layers(target, 1))
    for steps in range(1, 4):
        here.rolling.prepare(steps)

    def play(seed: int, turns: int) -> None:
        for text, _, _ in played(here, seed, turns, 3):
            here.leave(text)

    play(1, 400)
    before = torch.cuda.memory_allocated()
    play(2, 3000)
    assert torch.cuda.memory_allocated() == before
    for engine in (here.target, here.drafter):
        assert engine is not None
        engine.check()
        assert engine.books.allocator.free == 400


def test_each_round_is_launched_before_the_last_one_ends() -> None:
    """With a model that is large enough for its rounds to take longer than a slow host's part of them."""
    shape = replace(TINY, num_layers=24, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128)
    shape = replace(shape, intermediate_size=16384)
    target = random_model(shape, seed=3, dtype=torch.bfloat16, device=CUDA, drawn_on=CUDA)
    here = books(target, prefix_layers(target, 2))
    here.enter([1, 2, 3], GREEDY)
    for _ in range(4):  # until rounds are steady: the first ones make buffers
        here.launch([0], 3)
        here.read()
    with Trace() as trace:
        for _ in range(20):
            here.launch([0], 3)
            here.read()
    ahead = trace.launched_ahead()
    assert len(ahead) == 19
    assert all(ahead)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page_size", "heads"), [(1, (6, 2)), (16, (4, 4)), (16, (8, 1))])
def test_plans_of_the_device(page_size: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    for seed in range(6):
        check_chains(TritonBackend, seed, page_size, heads, CUDA, dtype, longest=700)


def test_kernels_are_the_plain_torch() -> None:
    for seed in range(20):
        check_spread(seed, CUDA)
        check_settle(seed, CUDA)
        check_make_up(seed, [None, 0.0, 0.8, 1.0][seed % 4], [2, 97, 128256][seed % 3], CUDA)


def test_too_little_memory_leaves_out_large_rounds(caplog: pytest.LogCaptureFixture) -> None:
    shape = replace(TINY, vocab_size=300_000)
    target, reference = (random_model(shape, seed=3, dtype=torch.float32, device=device) for device in (CUDA, CPU))
    here = books(target, prefix_layers(target, 1), max_num_seqs=64, num_pages=2000)
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    # The logits of 64 rows with 3 drafts take 307 MB.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 250 * 2**20) / total)
    try:
        with caplog.at_level(logging.WARNING):
            here.rolling.prepare(3)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "rounds of 64 rows and 3 drafts" in caplog.text
    assert "rounds of 1 rows" not in caplog.text
    warned, plainly = len(caplog.records), Engine(reference, config.Engine(page_size=4, num_pages=400), device=CPU)
    texts = [here.enter([i, 7], GREEDY) for i in range(40)]
    for count in (40, 3):
        here.launch([text.slot for text in texts[:count]], 3)
    for text in texts[:4]:
        found = here.leave(text)
        assert found == plain(plainly, text.tokens[:2], GREEDY, len(found))
    assert len(caplog.records) == warned
