"""A draft worker: drafters with as much room as its share of a device has, and where their features come in.

Knows the configuration. Does not know targets but for their shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch

from distspec import models
from distspec.config import Config
from distspec.config import Engine as EngineOptions
from distspec.drafters import draft_model
from distspec.drafters.base import Called, engine_of, pools_of
from distspec.engine.sizing import sized
from distspec.errors import FleetError
from distspec.kv.pool import KVPool
from distspec.protocol.messages import Hello
from distspec.rounds.arrivals import Arrivals
from distspec.workers.assembly.parts import (
    captures,
    drafters_of,
    grammars_of,
    prove,
    share_of,
    taps_of,
    transport_of,
)
from distspec.workers.compute import Later
from distspec.workers.draft import DraftWork
from distspec.workers.rehearsal import rehearse_drafter

_DRAFTED_AT_ONCE = 256
"""Requests that a draft worker takes on; a drafter forgets the oldest where its room ends."""


def draft_work(
    config: Config, worker: str, device: torch.device, later: Callable[[Later], None], is_called: Called
) -> tuple[DraftWork, Hello]:
    # Of its own tree each node may be expanded; targets only judge some, and read masks as wide as their room.
    live = config.speculation.max_live_nodes or config.engine.max_scratch_nodes
    config = msgspec.structs.replace(config, engine=msgspec.structs.replace(config.engine, max_scratch_nodes=live))
    shape = models.ModelConfig.from_pretrained(models.model_folder(config.model.name))
    longest = config.max_model_len(shape.max_position)
    taps, dtype = taps_of(config, shape), getattr(torch, config.model.dtype)
    width, grammars = len(taps) * shape.hidden_size, grammars_of(config, shape)
    model = draft_model(config, device=device)  # once: what is rehearsed has it too

    def play(options: EngineOptions) -> list[KVPool]:
        small = msgspec.structs.replace(config, engine=options)
        made = drafters_of(small, model, longest, shape.vocab_size, device, grammars)
        for one in made:
            if (engine := engine_of(one)) is not None:
                engine.runner.prepare(only_largest=True)
            if one is not None:
                rehearse_drafter(one, small, longest, width, dtype, device)
        return [pool for one in made for pool in pools_of(one)]

    options = sized(config.engine, device, share=share_of(config, "draft"), longest=longest, least=1, play=play)
    made = msgspec.structs.replace(config, engine=options)
    drafter, quick = drafters_of(made, model, longest, shape.vocab_size, device, grammars, is_called)
    if drafter is None:
        raise FleetError(f"{worker}: speculation.drafter is `none`")
    if (engine := engine_of(drafter)) is not None:
        with captures(config.engine, device):
            engine.runner.prepare()
    hello = Hello(
        worker=worker,
        role="draft",
        incarnation=0,
        fingerprint={},
        slots=_DRAFTED_AT_ONCE,
        capacity=_DRAFTED_AT_ONCE * longest,
        page_size=config.engine.page_size,
        max_model_len=longest,
        vocab_size=shape.vocab_size,
        drafts=True,
    )
    arrivals = None
    if taps:
        arrivals = Arrivals(transport_of(config, worker, device), later, width=width, dtype=dtype, device=device)
    return DraftWork(drafter, time.time, quick, arrivals, partial(prove, device)), hello
