"""Steps of the engine against the same model run densely over each path as a plain sequence."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from distspec import config
from distspec.engine import Engine, Segment
from distspec.models import Taps, random_model, save_pretrained
from distspec.models.llama import Llama
from distspec.protocol.values import ROOT, Node, SamplingParams
from distspec.sampling import SamplingRows, gumbel, process
from tests import causal, chain
from tests.shapes import TINY

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
MARGIN = 1e-3
"""Scores this close may fall either way by float noise: the bound of the design."""


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_model(TINY, seed=5, dtype=torch.float32, device=CPU)


def engine(model: Llama, page_size: int, positions: int = 2048, taps: tuple[int, ...] = ()) -> Engine:
    made = config.Engine(page_size=page_size, num_pages=-(-positions // page_size))
    return Engine(model, made, device=model.embedding.device, taps=taps)


TAPS = (2, 0)


def assert_features(target: Engine, slot: int) -> None:
    """What the engine kept of each committed position is what the plain model taps there."""
    tokens = torch.tensor(target.sequence(slot).tokens, dtype=torch.int64, device=target.device)
    taps = Taps(TAPS)
    with torch.inference_mode():
        target.model.forward(tokens, torch.arange(len(tokens), device=target.device), causal.Causal(), taps)
    torch.testing.assert_close(target.features(slot, range(len(tokens))), taps.features(), atol=1e-3, rtol=1e-3)


def assert_drawn(model: Llama, path: list[int], token: int | None, params: SamplingParams) -> None:
    """`token` is what the plain model draws after `path`: the best score, or one within MARGIN of it."""
    assert token is not None
    scores = chain.edited(causal.logits(model, path)[-1].cpu(), path, params)[None]
    if params.temperature:
        rows = SamplingRows.of([params], [len(path)], CPU)
        noise = gumbel(rows.seed, rows.choice, rows.position, scores.shape[1])
        scores = process(scores, rows) + noise
    assert float(scores.max() - scores[0, token]) < MARGIN


class Text:
    """One slot beside a plain account of it: committed tokens, prompt still to prefill, live nodes by path.

    names: what tells the committed tokens apart from equal ones: an id for a node, a fresh number otherwise.
    lines: the same for the path of each live node.
    """

    def __init__(self, engine: Engine, prompt: list[int], params: SamplingParams) -> None:
        self.engine = engine
        self.params = params = replace(params, prompt_tokens=len(prompt))
        self.slot = engine.open(prompt, params)
        self.tokens = prompt[: engine.sequence(self.slot).length]
        self.todo = prompt[len(self.tokens) :]
        self.paths: dict[int, list[int]] = {}
        self.lines: dict[int, list[int]] = {}
        self.fresh = count()
        self.names = [next(self.fresh) for _ in self.tokens]

    def segment(self, draw: random.Random) -> Segment:
        if self.todo:
            size = draw.choice([len(self.todo), draw.randint(1, len(self.todo))])
            tokens, self.todo = self.todo[:size], self.todo[size:]
        else:
            tokens = [draw.randrange(TINY.vocab_size) for _ in range(draw.choice([0, 1, 1, 3]))]
        self.tokens = self.tokens + tokens
        self.names = self.names + [next(self.fresh) for _ in tokens]
        alive = [id for id in self.paths if self.alive(id)]
        nodes: list[Node] = []
        for _ in range(0 if self.todo or not self.tokens else draw.choice([0, 1, 3, 8, 20])):
            parent = draw.choice([ROOT, *alive[-3:], *(node.id for node in nodes[-3:])])
            node = Node(id=next(self.fresh), parent=parent, token=draw.randrange(TINY.vocab_size))
            self.paths[node.id] = [*(self.tokens if parent == ROOT else self.paths[parent]), node.token]
            self.lines[node.id] = [*(self.names if parent == ROOT else self.lines[parent]), node.id]
            nodes.append(node)
        want = not self.todo or draw.random() < 0.5
        segment = Segment(self.slot, tuple(tokens), tuple(nodes), want)
        self.engine.reserve(self.slot, len(tokens) + len(nodes))
        return segment

    def alive(self, id: int) -> bool:
        """The path of a node is all that is committed, then nodes that were not dropped."""
        line, length = self.lines[id], len(self.names)
        return line[:length] == self.names and self.paths.keys() >= set(line[length:])

    def commit(self, draw: random.Random, segment: Segment) -> None:
        """Commit a path of this step's nodes, drop some or all of the others."""
        sequence = self.engine.sequence(self.slot)
        path: list[int] = []
        for node in segment.nodes:
            if node.parent == (path[-1] if path else ROOT) and draw.random() < 0.6:
                path.append(node.id)
        others = [id for id in sequence.nodes if id not in path]
        drop = others if draw.random() < 0.6 else [id for id in others if draw.random() < 0.5]
        if path:
            self.tokens, self.names = self.paths[path[-1]], self.lines[path[-1]]
        self.engine.commit(self.slot, path, drop)
        for id in [*path, *drop]:
            del self.paths[id]
        if draw.random() < 0.5:
            sequence.trim()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 4, 16, 64]), st.booleans(), st.booleans())
def test_any_mix_of_chunks_tokens_and_trees_draws_what_plain_sequences_draw(
    model: Llama, seed: int, page_size: int, sampled: bool, edited: bool
) -> None:
    mix_and_check(model, random.Random(seed), page_size, sampled, edited)


def mix_and_check(model: Llama, draw: random.Random, page_size: int, sampled: bool, edited: bool) -> None:
    """Six steps of random segments over up to five slots; each outcome and feature is held to a plain sequence."""
    target = engine(model, page_size, taps=TAPS)
    texts: list[Text] = []
    shared = [draw.randrange(TINY.vocab_size) for _ in range(70)]
    for _ in range(6):
        if len(texts) < 5:
            params = SamplingParams(max_tokens=1, seed=draw.getrandbits(64), top_p=0.9) if sampled else GREEDY
            if edited and draw.random() < 0.8:
                params = replace(params, max_tokens=20, stop_token_ids=(3, 5), min_p=draw.choice([0, 0.02]))
                params = replace(params, top_k=draw.choice([0, 30]), temperature=draw.choice([0.5, 1.5]) * sampled)
                params = chain.wish(draw, params, TINY.vocab_size)
            prompt = shared[: draw.randint(1, 70)] + [
                draw.randrange(TINY.vocab_size) for _ in range(draw.randint(0, 30))
            ]
            texts.append(Text(target, prompt, params))
        chosen = draw.sample(texts, draw.randint(1, len(texts)))
        segments = [text.segment(draw) for text in chosen]
        for text, segment, outcome in zip(chosen, segments, target.step(segments), strict=True):
            assert (outcome.root is not None) == bool(segment.tokens and segment.want)
            if outcome.root is not None:
                assert_drawn(model, text.tokens, outcome.root, text.params)
            for node, token in zip(segment.nodes, outcome.nodes, strict=True):
                assert_drawn(model, text.paths[node.id], token, text.params)
            text.commit(draw, segment)
            assert target.sequence(text.slot).tokens == text.tokens
            assert_features(target, text.slot)
        target.check()
        if len(texts) > 2 and draw.random() < 0.5:
            target.close(texts.pop(draw.randrange(len(texts))).slot, keep=draw.random() < 0.8)
    for text in texts:
        target.close(text.slot)
    target.check()


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=1, seed=2**64 - 1)])
def test_a_request_goes_on_the_same_from_cached_pages(model: Llama, page_size: int, params: SamplingParams) -> None:
    target = engine(model, page_size)
    prompt = [i * 7 % 97 for i in range(130)]
    drawn = []
    for _ in range(2):
        slot = target.open(prompt, params)
        cached = target.sequence(slot).length
        target.reserve(slot, 200)
        drawn.append([target.step([Segment(slot, tuple(prompt[cached:]))])[0].root])
        for _ in range(8):
            drawn[-1].append(target.step([Segment(slot, (drawn[-1][-1] or 0,))])[0].root)
        target.close(slot)
    assert cached == (len(prompt) - 1) // page_size * page_size
    assert drawn[0] == drawn[1]
    assert_drawn(model, prompt, drawn[0][0], params)


def test_greedy_decoding_is_that_of_transformers(model: Llama, tmp_path: Path) -> None:
    save_pretrained(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    want = theirs.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False, eos_token_id=None)[0].tolist()
    target = engine(model, 16)
    slot = target.open(prompt, GREEDY)
    target.reserve(slot, 64)
    text, tokens = list(prompt), tuple(prompt)
    while len(text) < len(want):
        text.append(target.step([Segment(slot, tokens)])[0].root or 0)
        tokens = (text[-1],)
    assert text == want


@pytest.mark.parametrize("taps", [(), TAPS])
def test_what_moved_to_another_engine_goes_on_there(model: Llama, taps: tuple[int, ...]) -> None:
    source, target = engine(model, 4, taps=taps), engine(model, 16, taps=taps)
    prompt = tuple(i * 11 % 97 for i in range(37))
    here = source.open(prompt, GREEDY)
    source.reserve(here, 64)
    first = source.step([Segment(here, prompt)])[0].root
    there = target.open(prompt, GREEDY, use_cache=False)
    target.reserve(there, 64)
    target.sequence(there).append(prompt)
    target.scatter(there, 0, source.gather(here, 0, 20))
    target.scatter(there, 20, source.gather(here, 20, 17))
    assert first is not None
    assert torch.equal(target.gather(there, 3, 30), source.gather(here, 3, 30))
    assert_drawn(model, [*prompt, first], target.step([Segment(there, (first,))])[0].root, GREEDY)
    assert torch.equal(target.features(there, range(5, 37)), source.features(here, range(5, 37)))
    if taps:
        assert_features(target, there)
