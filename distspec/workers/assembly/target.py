"""A target worker: a model, an engine with as much room as its share of a device has, and a desk with its drafters.

Knows the configuration and the role. Does not know how drafters are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import msgspec
import torch

from distspec import models
from distspec.config import Config
from distspec.config import Engine as EngineOptions
from distspec.constraints import Grammars
from distspec.drafters import draft_model
from distspec.drafters.base import pools_of
from distspec.engine import Engine
from distspec.engine.acceptance import ACCEPTANCES
from distspec.engine.measure import step_costs
from distspec.engine.rehearsal import rehearse
from distspec.engine.sizing import sized
from distspec.engine.synthetic import SyntheticEngine
from distspec.kv.pool import KVPool
from distspec.models.draft_checkpoint import DraftModel
from distspec.models.llama import Llama
from distspec.protocol.messages import Hello
from distspec.rounds.desk import Desk
from distspec.transfer.meeting import Place
from distspec.workers.assembly.parts import captures, drafters_of, grammars_of, share_of, taps_of, transport_of
from distspec.workers.compute import Later
from distspec.workers.rehearsal import chains, rehearse_desk
from distspec.workers.target import TargetWork


def target_work(
    config: Config, worker: str, device: torch.device, later: Callable[[Later], None]
) -> tuple[TargetWork, Hello, Place]:
    role = worker.partition(":")[0]
    model = models.load_model(config.model.name, dtype=getattr(torch, config.model.dtype), device=device)
    # Where the work and its desk come from below, grammars are ready at the earliest when requests arrive.
    grammars = grammars_of(config, model.config, wake=lambda: later(lambda: work.compiled()))
    # Loaded once: what is rehearsed has it too.
    draft = draft_model(config, device=device, target=model) if _drafts_here(config, role) else None
    assemble = partial(assembled, role=role, model=model, draft=draft, device=device, grammars=grammars)
    made = assemble(target_sized(config, role, model, device, assemble))
    with captures(config.engine, device):
        made.desk.prepare(made.steps)
    engine = made.engine
    transport = transport_of(config, worker, device)
    work = TargetWork(engine, made.desk, transport, later)
    hello = Hello(
        worker=worker,
        role=role,
        incarnation=0,
        fingerprint={},
        slots=engine.slots,
        capacity=engine.capacity,
        page_size=engine.page_size,
        max_model_len=engine.max_model_len,
        vocab_size=model.config.vocab_size,
        step_cost=step_costs(engine),
        drafts=made.drafts,
    )
    return work, hello, transport.place


class Assembled(NamedTuple):
    """steps: numbers of drafts of the rounds that may roll there. drafts: there is a drafter. pools: of the engine and
    the drafters."""

    engine: Engine
    desk: Desk
    steps: Collection[int]
    drafts: bool
    pools: list[KVPool]


def assembled(
    config: Config,
    role: str,
    model: Llama,
    draft: Llama | DraftModel | None,
    device: torch.device,
    grammars: Grammars | None,
) -> Assembled:
    """All of a target worker that takes memory beside weights. draft: the drafter's model, if it is here and has
    one."""
    local = _drafts_here(config, role)
    longest = config.max_model_len(model.config.max_position)
    drafter, quick = (
        drafters_of(config, draft, longest, model.config.vocab_size, device, grammars) if local else (None, None)
    )
    kind = Engine if config.speculation.synthetic_acceptance is None else SyntheticEngine
    engine = kind(
        model,
        config.engine,
        device=device,
        max_model_len=config.model.max_model_len,
        taps=taps_of(config, model.config),
        acceptance=ACCEPTANCES[config.speculation.acceptance],
        grammars=grammars,
    )
    desk = Desk(
        engine,
        drafter,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        clock=time.time,
        quick=quick,
        overlap=config.engine.overlap and device.type == "cuda",  # a CPU has computed a round when it is launched
        odds=config.speculation.synthetic_acceptance or (),
    )
    steps = _steps(config, local) if role == "decode" else ()
    return Assembled(engine, desk, steps, drafter is not None, [engine.pool, *pools_of(drafter), *pools_of(quick)])


def target_sized(
    config: Config, role: str, model: Llama, device: torch.device, assemble: Callable[[Config], Assembled]
) -> Config:
    """With engine.num_pages, for the target and a drafter beside it alike: both hold the same texts."""

    def play(options: EngineOptions) -> list[KVPool]:
        small = msgspec.structs.replace(
            config, engine=options, model=msgspec.structs.replace(config.model, max_model_len=None)
        )
        made = assemble(small)
        made.desk.prepare(made.steps, only_largest=True)
        rehearse(made.engine, options)
        rehearse_desk(made.desk, made.engine, small, made.drafts)
        return made.pools

    longest = config.max_model_len(model.config.max_position)
    least, share = config.model.max_model_len or 1, share_of(config, role)
    options = sized(config.engine, device, share=share, longest=longest, least=least, play=play)
    return msgspec.structs.replace(config, engine=options)


def _drafts_here(config: Config, role: str) -> bool:
    return config.speculation.placement == "local" and role == "decode"


def _steps(config: Config, local: bool) -> Collection[int]:
    """Numbers of drafts of rounds that may roll, as far as they are configured. local: there is a drafter for them."""
    spec = config.speculation
    return {0, *chains(config)} if local and spec.topk == 1 and spec.acceptance == "coupled" else {0}
