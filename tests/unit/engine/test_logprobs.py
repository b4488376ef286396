"""What a step tells of its tokens is what one forward over the whole text says of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from distspec import config
from distspec.engine import Engine, Segment, reports
from distspec.protocol.values import ROOT, Node, SamplingParams, TokenLogprobs
from distspec.sampling import SamplingRows, process
from tests.causal import logits
from tests.chain import edited
from tests.desks import CPU, GREEDY, SEEDED, SHAPE, model

Mode = Literal["raw_logprobs", "processed_logprobs"]
ASKING = st.sampled_from([None, 0, 3, 20])
TRUNCATED = replace(SEEDED, temperature=0.7, top_k=4)
MASKED = replace(SEEDED, allowed_token_ids=(1, 4, 7))


def engine(mode: Mode) -> Engine:
    return Engine(model(), config.Engine(num_pages=80, logprobs_mode=mode), device=CPU)


def check(said: TokenLogprobs, text: tuple[int, ...], token: int, params: SamplingParams, mode: Mode) -> None:
    scores = logits(model(), list(text))[-1:]
    if mode == "processed_logprobs":
        scores = edited(scores[0], text, params)[None]
    if mode == "processed_logprobs" and params.temperature:
        scores = process(scores, SamplingRows.of([params], [len(text)], CPU))
    right = scores[0].log_softmax(-1)
    assert said.logprob == pytest.approx(float(right[token]), abs=1e-4)
    assert params.logprobs is not None
    assert len(said.top) == min(params.logprobs, int(right.isfinite().sum()))
    assert [logprob for _, logprob in said.top] == pytest.approx(right.topk(len(said.top)).values.tolist(), abs=1e-4)
    assert all(logprob == pytest.approx(float(right[other]), abs=1e-4) for other, logprob in said.top)
    assert (said.rank == 1) == (said.logprob == pytest.approx(float(right.max()), abs=1e-4))


@st.composite
def trees(draw: st.DrawFn) -> tuple[Node, ...]:
    tokens = draw(st.lists(st.integers(0, SHAPE.vocab_size - 1), max_size=5))
    return tuple(node(i, draw(st.integers(ROOT, i - 1)), token) for i, token in enumerate(tokens))


def path(nodes: tuple[Node, ...], at: int) -> tuple[int, ...]:
    return () if at == ROOT else (*path(nodes, nodes[at].parent), nodes[at].token)


def node(i: int, parent: int, token: int) -> Node:
    return Node(id=i, parent=parent, token=token)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["raw_logprobs", "processed_logprobs"]))
def test_every_outcome_has_the_logprobs_of_its_own_path(data: st.DataObject, mode: Mode) -> None:
    """Slots that ask beside slots that do not, chains, trees and bets."""
    of, segments, asked = engine(mode), list[Segment](), list[SamplingParams]()
    for _ in range(data.draw(st.integers(1, 4))):
        params = replace(data.draw(st.sampled_from([GREEDY, SEEDED, TRUNCATED, MASKED])), logprobs=data.draw(ASKING))
        prompt = tuple(data.draw(st.lists(st.integers(0, SHAPE.vocab_size - 1), min_size=1, max_size=9)))
        slot = of.open(prompt, params, use_cache=False)
        of.reserve(slot, 16)
        nodes, bet = data.draw(trees()), None
        if not nodes:
            bet = data.draw(st.none() | st.integers(0, SHAPE.vocab_size - 1))
        segments.append(Segment(slot, prompt, nodes, bet=bet, want=bet is not None or data.draw(st.booleans())))
        asked.append(params)
    for segment, params, outcome in zip(segments, asked, of.step(segments), strict=True):
        texts = [segment.tokens] if outcome.root is not None else []
        texts += [(*segment.tokens, *path(segment.nodes, node.id)) for node in segment.nodes]
        texts += [segment.committed] if segment.bet is not None else []
        drawn = ([outcome.root] if outcome.root is not None else []) + outcome.nodes
        if params.logprobs is None:
            assert outcome.logprobs == []
            continue
        for said, text, token in zip(outcome.logprobs, texts, drawn, strict=True):
            check(said, text, token, params, mode)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(["raw_logprobs", "processed_logprobs"]))
def test_given_tokens_have_the_models_own_logprobs(data: st.DataObject, mode: Mode) -> None:
    """However a prompt is cut into chunks, and however many of its logits may be in memory at once."""
    of = engine(mode)
    params = replace(TRUNCATED, prompt_logprobs=2)
    prompt = tuple(data.draw(st.lists(st.integers(0, SHAPE.vocab_size - 1), min_size=2, max_size=30)))
    slots = [of.open(prompt, params, use_cache=False), of.open(prompt, GREEDY, use_cache=False)]
    for slot in slots:
        of.reserve(slot, 40)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, len(prompt) - 1), max_size=3))), len(prompt)]
    found: list[TokenLogprobs] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "_CHUNK", data.draw(st.sampled_from([1, 3, 256])))
        for start, end in pairwise(cuts):
            tokens, want = prompt[start:end], end == len(prompt)
            given_ = Segment(slots[0], tokens, want=want, given=prompt[start + 1 : end + 1])
            mine, other = of.step([given_, Segment(slots[1], tokens, want=want)])
            found += mine.given
            assert (other.given, mine.logprobs, other.logprobs) == ([], [], [])
    for at, said in enumerate(found, start=1):
        check(said, prompt[:at], prompt[at], replace(GREEDY, logprobs=2), "raw_logprobs")
    assert len(found) == len(prompt) - 1


def test_logprobs_change_no_token() -> None:
    of = engine("processed_logprobs")
    outcomes = []
    for asks in (None, 5):
        slot = of.open((1, 2, 3), replace(TRUNCATED, logprobs=asks), use_cache=False)
        of.reserve(slot, 8)
        nodes = (node(0, ROOT, 4), node(1, 0, 5))
        [outcome] = of.step([Segment(slot, (1, 2, 3), nodes)])
        outcomes.append((outcome.root, outcome.nodes))
    assert outcomes[0] == outcomes[1]
