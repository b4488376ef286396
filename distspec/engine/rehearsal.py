"""The largest steps of an engine, done once to see what memory they take.

Knows what bounds a step, and what requests may ask for that takes memory. Does not know how memory is measured, or what
else it is for.
"""

from __future__ import annotations

import msgspec
import torch

from distspec import config
from distspec.engine.batch import Segment
from distspec.engine.engine import Engine
from distspec.protocol.values import ROOT, Node, SamplingParams

TRUNCATING = SamplingParams(max_tokens=1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)
"""Draws that take the most memory."""

DEMANDING = msgspec.structs.replace(
    TRUNCATING,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
    logprobs=20,
    prompt_logprobs=20,
)
"""All else of a request that takes memory beside its KV."""


def rehearse(engine: Engine, options: config.Engine) -> None:
    """A chunk of a prompt, a copy of its KV as for a transfer, and a step that judges nodes in all slots.

    options: of the engine. Nothing is left in its slots.
    """
    _chunk(engine, options.max_num_batched_tokens)
    slots = min(engine.slots, options.max_num_batched_tokens)
    rows = -(-options.max_num_batched_tokens // slots)  # of each
    _nodes(engine, slots, min(options.max_scratch_nodes, rows - 1))


def _chunk(engine: Engine, rows: int) -> None:
    tokens = (0,) * min(rows, engine.max_model_len)
    slot = engine.open((), DEMANDING, use_cache=False)
    engine.reserve(slot, len(tokens))
    engine.step([Segment(slot, tokens, given=tokens[1:])])
    engine.gather(slot, 0, len(tokens))
    engine.close(slot, keep=False)


def _nodes(engine: Engine, count: int, each: int) -> None:
    """A step of so many slots, with one token and `each` nodes below it in each; weighed, where drafts are."""
    nodes = tuple(Node(id=i, parent=ROOT, token=0) for i in range(each))
    vocab = engine.model.config.vocab_size
    law = torch.full((vocab,), 1 / vocab, device=engine.device)
    laws = () if engine.is_coupled else (law,) * each
    slots = [engine.open((), DEMANDING, use_cache=False) for _ in range(count)]
    for slot in slots:
        engine.reserve(slot, 1 + each)
    engine.step([Segment(slot, (0,), nodes, laws=laws) for slot in slots])
    for slot in slots:
        engine.close(slot, keep=False)
