"""The most that a worker's desk or drafter has to do at once, done to see what memory it takes.

Knows requests by the slots there are, and the largest drafts that the configuration asks for. Does not know how memory
is measured.
"""

from __future__ import annotations

from itertools import product

import msgspec
import torch

from distspec.config import Config
from distspec.drafters import Drafter, DraftRow
from distspec.engine import Engine
from distspec.engine.rehearsal import DEMANDING, TRUNCATING
from distspec.engine.sizing import SHORT
from distspec.protocol.messages import Drop, Lease
from distspec.protocol.values import SamplingParams, Shape
from distspec.rounds.desk import Desk

_PROMPT = 4
_STEPS = 4
"""Drafts of a round, where their number follows what is measured."""


def chains(config: Config) -> tuple[int, ...]:
    """Numbers of drafts of a round that are configured; none if they follow what is measured."""
    steps = config.speculation.num_speculative_tokens
    if steps is None:
        return ()
    return tuple(steps.values()) if isinstance(steps, dict) else (steps,)


def rehearse_desk(desk: Desk, engine: Engine, config: Config, drafts: bool) -> None:
    """Leases in all slots, for rounds of a few tokens: plain ones, and where there are drafts, of the largest trees;
    each kind once by what the device knows, and once with all that the host has a part in."""
    shapes: list[Shape | None] = [None]
    if drafts:
        shapes += [_shape(config, steps, config.speculation.topk) for steps in chains(config) or (_STEPS,)]
    for shape, params in product(shapes, (TRUNCATING, DEMANDING)):
        nodes = min(shape.nodes, config.engine.max_scratch_nodes - 1) if shape is not None else 0
        _lease_all(desk, engine, params, shape, nodes)


def _lease_all(desk: Desk, engine: Engine, params: SamplingParams, shape: Shape | None, nodes: int) -> None:
    """Leases in all slots, from their beginning to their end."""
    length = min(SHORT, engine.max_model_len)
    params = msgspec.structs.replace(params, max_tokens=length - _PROMPT, prompt_tokens=_PROMPT)
    for request in range(engine.slots):
        # Its own prompt each: what is shared takes less.
        tokens = tuple((request + i) % engine.model.config.vocab_size for i in range(_PROMPT))
        desk.receive(Lease(request=request, epoch=0, start=0, tokens=tokens, shape=shape, nodes=nodes, params=params))
    while desk.ready():
        desk.step()
    for request in range(engine.slots):
        desk.receive(Drop(request=request, epoch=0))
    while desk.ready():
        desk.step()


def rehearse_drafter(
    drafter: Drafter, config: Config, longest: int, features: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Texts that fill a step, and then short ones in all slots, with the largest trees.

    longest: tokens of a text. features: values that come with each token, of this dtype.
    """
    spec, options = config.speculation, config.engine
    shape = _shape(config, max((_STEPS, *chains(config))), max(spec.topk, spec.branch_topk))
    long = max(1, min(options.max_num_batched_tokens, longest - shape.depth))  # nobody computes what has no drafts
    filling = min(options.max_num_batched_tokens // long, options.max_num_seqs)
    for count, length in ((filling, long), (options.max_num_seqs, _PROMPT)):
        given = torch.zeros(length, features, dtype=dtype, device=device) if features else None
        params = msgspec.structs.replace(TRUNCATING, max_tokens=SHORT, prompt_tokens=length)
        drafter.propose([DraftRow(request, 0, (0,) * length, shape, params, given) for request in range(count)])
        for request in range(count):
            drafter.forget(request)


def _shape(config: Config, steps: int, topk: int) -> Shape:
    if topk == 1:
        return Shape(steps=steps, nodes=steps, depth=steps)
    most = config.engine.max_scratch_nodes
    return Shape(steps=steps, topk=topk, width=most, nodes=most, depth=steps)
