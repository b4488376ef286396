"""The default model on real actors: one answer per request, whatever fleet serves it.

Any two of the sizes of a fleet meet (tests/oracle/test_matrix.py has more of them on a tiny model), and each fleet
serves all prompts at once, under all policies. Greedy answers are those of transformers on the same weights,
sampled ones those of the plain target.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from distspec.config import Config, load
from distspec.models import load_model, load_tokenizer, model_folder, prefix_layers, save_pretrained
from distspec.models.llama import Llama
from distspec.protocol.values import SamplingParams, SpeculationChoice
from distspec.workers import fleet as fleets
from distspec.workers.client import Client
from tests.covering import covering
from tests.teacher import MARGIN, excused

pytestmark = [pytest.mark.needs("model"), pytest.mark.usefixtures("cluster")]

DEFAULT = "smollm2-135m"
LENGTH = 64
POLICIES = ("ar", "sd", "dsi")
QUESTIONS = (
    "What is the capital of France?",
    "Count from 1 to 30.",
    "Write one sentence about the sea.",
    "List five animals that live in Africa.",
    "What is 17 plus 25?",
    "Repeat this word ten times: blue",
    "Explain photosynthesis to a child.",
    "Write a Python function that adds two numbers.",
    "Who wrote Romeo and Juliet?",
    "Translate to French: good morning, my friend.",
)
PASSAGE = (
    "The river rose slowly through the night. By morning the river had covered the road, and by noon the river "
    "had covered the bridge. Nobody in the village remembered a spring in which the river had risen so far."
)
TEXTS = (
    "Once upon a time",
    "def fibonacci(n):",
    "1 2 3 4 5 6 7 8 9 10 11 12",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Dear Sir or Madam,",
    PASSAGE,
    f"{PASSAGE} {PASSAGE} The river",
    f"{PASSAGE} In short,",
    '{"name": "Ada", "age": 36}, {"name": "Alan", "age": 41}, {"name":',
    "A",
)


@dataclass(frozen=True)
class Cell:
    verifiers: int
    drafter: str
    page_size: int
    colocated: bool


CELLS = [Cell(*row) for row in covering((0, 1, 2), ("ngram", "standalone"), (1, 16, 64), (True, False), seed=2)]
"""Policies meet all of these, since each fleet serves all of them. The seed is one of few rows with `standalone`, which
is by far the dearest to compute.
"""


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    params: SamplingParams


class Reference:
    """What the plain target answers. excused: tokens that were within the margin of the best, of `tokens`.

    The first answer to a request is held to the best token after each of its own prefixes, by one forward of
    transformers if it is greedy and of the plain target if it is sampled: so it is what they would have said.
    All further answers are held to that one.
    """

    def __init__(self, target: Llama) -> None:
        self.target = target
        self.theirs = AutoModelForCausalLM.from_pretrained(model_folder(DEFAULT), dtype=torch.float32)
        self.asks = requests()
        self.right: dict[Ask, list[int]] = {}
        self.tokens = self.excused = 0

    def judge(self, ask: Ask, answer: list[int]) -> None:
        assert len(answer) == ask.params.max_tokens
        self.tokens += len(answer)
        if ask not in self.right:
            self.right[ask] = answer
            self.excused += self._greedy(ask, answer) if ask.params.temperature == 0 else self._excused(ask, answer)
        elif answer != self.right[ask]:
            self.excused += max(1, self._excused(ask, answer))

    def _excused(self, ask: Ask, answer: list[int]) -> int:
        return excused(self.target, ask.prompt, answer, ask.params)

    @torch.inference_mode()
    def _greedy(self, ask: Ask, answer: list[int]) -> int:
        text = torch.tensor([[*ask.prompt, *answer]])
        scores = self.theirs(text[:, :-1]).logits[0, len(ask.prompt) - 1 :]
        margins = scores.amax(dim=-1) - scores.gather(1, text[0, len(ask.prompt) :, None])[:, 0]
        assert float(margins.max()) < MARGIN, f"{ask}: margins {margins.tolist()}"
        return int((margins > 0).sum())


@pytest.fixture(scope="module")
def target() -> Llama:
    return load_model(DEFAULT, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def reference(target: Llama) -> Iterator[Reference]:
    made = Reference(target)
    yield made
    print(f"\n{made.excused} of {made.tokens} tokens excused by a margin")
    assert made.excused <= made.tokens // 500


def requests() -> list[Ask]:
    """Twenty prompts, every other one greedy, the others at temperature 1; and one with n=3."""
    tokenizer = load_tokenizer(DEFAULT)
    prompts = [tuple(tokenizer.encode(text)) for text in TEXTS]
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        prompts.append(tuple(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)))
    asks = [
        Ask(prompt, SamplingParams(max_tokens=LENGTH, seed=1000 + i, temperature=float(i % 2)))
        for i, prompt in enumerate(prompts)
    ]
    return asks + [Ask(prompts[-1], SamplingParams(max_tokens=16, seed=7, choice=i)) for i in range(3)]


@pytest.fixture(scope="module")
def draft_model(target: Llama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of the target: a drafter that is right now and then."""
    folder = tmp_path_factory.mktemp("drafter")
    save_pretrained(prefix_layers(target, 4), folder, load_tokenizer(DEFAULT))
    return folder


def configuration(cell: Cell, draft_model: Path) -> Config:
    others = {} if cell.colocated else {"prefill": {"replicas": 1}, "draft": {"replicas": 1}}
    return load(
        {
            "name": "default-model",
            "model": {"name": DEFAULT, "max_model_len": 256},
            "engine": {
                "page_size": cell.page_size,
                "num_pages": 24 * 256 // cell.page_size,
                "max_num_seqs": 24,
                "max_num_batched_tokens": 96,
                "num_threads": 1,
            },
            "speculation": {
                "policy": "sd",
                "drafter": cell.drafter,
                "draft_model": str(draft_model),
                "placement": "local" if cell.colocated else "pool",
                "num_speculative_tokens": 3,
            },
            "coordinator": {"worker_timeout_s": 30.0, "lease_s": 60.0},
            "pools": {"decode": {"replicas": 1}, "verify": {"replicas": cell.verifiers}, **others},
        }
    )


@asynccontextmanager
async def fleet(cell: Cell, draft_model: Path) -> AsyncIterator[tuple[Client, fleets.FleetHandle]]:
    handle = await asyncio.to_thread(fleets.launch, configuration(cell, draft_model))
    client = handle.client(patience_s=120.0)
    try:
        await client.start()
        yield client, handle
    finally:
        await client.close()
        await asyncio.to_thread(handle.shutdown)


async def ask(client: Client, wish: Ask, policy: str) -> list[int]:
    tokens: list[int] = []
    async for output in client.submit(wish.prompt, wish.params, SpeculationChoice(policy=policy)):
        assert output.start == len(tokens)
        tokens += output.tokens
    assert output.finish_reason == "length"
    return tokens


async def at_rest(handle: fleets.FleetHandle) -> None:
    """Until nothing is open anywhere; if that never comes, the test ends with its time."""
    while True:
        status = await handle.status()
        if not status["requests"] and all(worker["open"] == 0 for worker in status["workers"].values()):
            return
        await asyncio.sleep(0.1)


def name(cell: Cell) -> str:
    placement = "colocated" if cell.colocated else "disaggregated"
    return f"verify{cell.verifiers}-{cell.drafter}-page{cell.page_size}-{placement}"


@pytest.mark.parametrize("cell", CELLS, ids=name)
async def test_answers_are_those_of_the_plain_target(cell: Cell, draft_model: Path, reference: Reference) -> None:
    shift = CELLS.index(cell)
    policies = [POLICIES[(i // 2 + shift) % 3] for i in range(len(reference.asks))]
    async with fleet(cell, draft_model) as (client, handle):
        answers = await asyncio.gather(*map(ask, [client] * len(policies), reference.asks, policies))
        await at_rest(handle)
        spans = Counter((span.track.partition(":")[0], span.name) for span in await handle.trace())
    for wish, answer in zip(reference.asks, answers, strict=True):
        reference.judge(wish, answer)
    assert len({tuple(reference.right[wish]) for wish in reference.asks[-3:]}) == 3, "choices differ"
    check_that_all_took_part(cell, spans)


def check_that_all_took_part(cell: Cell, spans: Counter[tuple[str, str]]) -> None:
    """Answers prove nothing about workers that had no part in them."""
    assert (spans["verify", "verify"] > 0) == (cell.verifiers > 0)
    assert (spans["prefill", "prefill"] > 0) == (not cell.colocated)
    assert (spans["decode", "transfer"] > 0) == (not cell.colocated)
    assert (spans["draft", "draft"] > 0) == (not cell.colocated)
    assert (spans["decode", "draft"] > 0) == cell.colocated
    assert spans["decode", "round"] > 0
