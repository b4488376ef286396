"""What a worker is made of: its model or drafter, its desk, its transport. All that is heavy to import is here.

Knows the configuration, the device and Ray's addresses. Does not know the channel.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec
import torch

from distspec import models
from distspec.config import FEATURE_DRAFTERS, Config, Pool
from distspec.config import Engine as EngineOptions
from distspec.constraints import Compiler, Grammars
from distspec.drafters import Drafter, make
from distspec.drafters.base import pools_of
from distspec.drafters.synthetic import SyntheticDrafter
from distspec.engine import Engine
from distspec.engine.acceptance import ACCEPTANCES
from distspec.engine.rehearsal import rehearse
from distspec.engine.sizing import ran_out, sized
from distspec.engine.synthetic import SyntheticEngine
from distspec.errors import FleetError
from distspec.kv.pool import KVPool
from distspec.models.llama import Llama
from distspec.protocol.messages import Hello
from distspec.rounds.arrivals import Arrivals
from distspec.rounds.desk import Desk
from distspec.transfer.base import End
from distspec.transfer.collective import Collective
from distspec.transfer.links import link
from distspec.transfer.meeting import Place
from distspec.workers.compute import Later, Work
from distspec.workers.draft import DraftWork
from distspec.workers.fingerprint import fingerprint
from distspec.workers.names import actor, actor_name, node_address
from distspec.workers.rehearsal import chains, rehearse_desk, rehearse_drafter
from distspec.workers.target import TargetWork

_DRAFTED_AT_ONCE = 256
"""Requests that a draft worker takes on; a drafter forgets the oldest where its room ends."""


@dataclass(frozen=True, slots=True)
class Built:
    """hello: with incarnation 0, to be replaced. place: where peers meet a target worker. begin: to be called on the
    thread that computes, since torch's number of threads is each thread's own."""

    work: Work
    hello: Hello
    place: Place | None
    begin: Callable[[], None]


def build(config: Config, worker: str, threads: int, later: Callable[[Later], None]) -> Built:
    """Load the worker `pool:index`. later: runs an action on its compute thread.

    threads: torch's in this process; -n shares the host's cores among n such workers. Raises ConfigError,
    ModelNotFound, or what the device says.
    """
    begin = partial(torch.set_num_threads, threads if threads > 0 else max(1, len(os.sched_getaffinity(0)) // -threads))
    begin()
    device = _device(config)
    work: Work
    place: Place | None = None
    try:
        if worker.startswith("draft:"):
            work, hello = _draft(config, worker, device, later)
        else:
            work, hello, place = _target(config, worker, device, later)
    except torch.cuda.OutOfMemoryError as error:
        raise ran_out(device, config.engine) from error
    hello = msgspec.structs.replace(hello, fingerprint=fingerprint(config, device), node=node_address())
    return Built(work, hello, place, begin)


def _target(
    config: Config, worker: str, device: torch.device, later: Callable[[Later], None]
) -> tuple[TargetWork, Hello, Place]:
    role = worker.partition(":")[0]
    model = models.load_model(config.model.name, dtype=getattr(torch, config.model.dtype), device=device)
    # Where the work and its desk come from below, grammars are ready at the earliest when requests arrive.
    grammars = _grammars(config, model.config, wake=lambda: later(lambda: work.compiled()))
    assemble = partial(_assembled, role=role, model=model, device=device, grammars=grammars)
    engine, desk, drafts, _ = assemble(_target_sized(config, role, model, device, assemble))
    transport = _transport(config, worker, device)
    work = TargetWork(engine, desk, transport, later)
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
        step_cost=engine.measure(),
        drafts=drafts,
    )
    return work, hello, transport.place


class _Assembled(NamedTuple):
    """drafts: there is a drafter. pools: of the engine and the drafters."""

    engine: Engine
    desk: Desk
    drafts: bool
    pools: list[KVPool]


def _assembled(config: Config, role: str, model: Llama, device: torch.device, grammars: Grammars | None) -> _Assembled:
    """All of a target worker that takes memory beside the target's weights."""
    local = config.speculation.placement == "local" and role == "decode"
    longest = config.max_model_len(model.config.max_position)
    drafter, quick = (
        _drafters(config, longest, model.config.vocab_size, device, grammars, model) if local else (None, None)
    )
    kind = Engine if config.speculation.synthetic_acceptance is None else SyntheticEngine
    engine = kind(
        model,
        config.engine,
        device=device,
        max_model_len=config.model.max_model_len,
        taps=_taps(config, model.config),
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
    if role == "decode":
        desk.prepare({0, *_chains(config)} if local else {0})
    return _Assembled(engine, desk, drafter is not None, [engine.pool, *pools_of(drafter), *pools_of(quick)])


def _target_sized(
    config: Config, role: str, model: Llama, device: torch.device, assemble: Callable[[Config], _Assembled]
) -> Config:
    """With engine.num_pages, for the target and a drafter beside it alike: both hold the same texts."""

    def play(options: EngineOptions) -> list[KVPool]:
        small = msgspec.structs.replace(
            config, engine=options, model=msgspec.structs.replace(config.model, max_model_len=None)
        )
        engine, desk, drafts, pools = assemble(small)
        rehearse(engine, options)
        rehearse_desk(desk, engine, small, drafts)
        return pools

    longest = config.max_model_len(model.config.max_position)
    least, share = config.model.max_model_len or 1, _share(config, role)
    options = sized(config.engine, device, share=share, longest=longest, least=least, play=play)
    return msgspec.structs.replace(config, engine=options)


def _chains(config: Config) -> Collection[int]:
    """Numbers of drafts of a round that are configured, if such rounds may roll."""
    spec = config.speculation
    return () if spec.topk > 1 or spec.acceptance != "coupled" else chains(config)


def _draft(
    config: Config, worker: str, device: torch.device, later: Callable[[Later], None]
) -> tuple[DraftWork, Hello]:
    shape = models.ModelConfig.from_pretrained(models.model_folder(config.model.name))
    longest = config.max_model_len(shape.max_position)
    taps, dtype = _taps(config, shape), getattr(torch, config.model.dtype)
    width, grammars = len(taps) * shape.hidden_size, _grammars(config, shape)

    def play(options: EngineOptions) -> list[KVPool]:
        small = msgspec.structs.replace(config, engine=options)
        made = _drafters(small, longest, shape.vocab_size, device, grammars)
        for one in made:
            if one is not None:
                rehearse_drafter(one, small, width, dtype, device)
        return [pool for one in made for pool in pools_of(one)]

    options = sized(config.engine, device, share=_share(config, "draft"), longest=longest, least=1, play=play)
    made = msgspec.structs.replace(config, engine=options)
    drafter, quick = _drafters(made, longest, shape.vocab_size, device, grammars)
    if drafter is None:
        raise FleetError(f"{worker}: speculation.drafter is `none`")
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
        arrivals = Arrivals(_transport(config, worker, device), later, width=width, dtype=dtype, device=device)
    return DraftWork(drafter, time.time, quick, arrivals), hello


def _taps(config: Config, shape: models.ModelConfig) -> tuple[int, ...]:
    """Where in the target the drafter wants its features read. All targets keep these: they go along with KV, and a
    remote drafter gets them from whoever computed them. Raises ConfigError, ModelNotFound."""
    spec = config.speculation
    if spec.drafter not in FEATURE_DRAFTERS or spec.draft_model is None:
        return ()
    return models.read_draft(spec.drafter, models.model_folder(spec.draft_model), shape).taps


def _grammars(config: Config, shape: models.ModelConfig, wake: Callable[[], None] = lambda: None) -> Grammars | None:
    """Of the model's tokenizer; None where it has none. wake: see Grammars."""
    folder = models.model_folder(config.model.name)
    if not (folder / models.TOKENIZER).is_file():
        return None

    def load() -> Compiler:
        tokenizer = models.load_tokenizer_folder(folder)
        return Compiler(tokenizer, shape.vocab_size, models.stop_ids(tokenizer, shape.eos_token_ids))

    return Grammars(load, wake)


def _drafters(
    config: Config,
    max_model_len: int,
    vocab_size: int,
    device: torch.device,
    grammars: Grammars | None,
    target: Llama | None = None,
) -> tuple[Drafter | None, Drafter | None]:
    """The drafter and its fallback. vocab_size: of the target; target: it, where it is loaded here."""
    fallback = msgspec.structs.replace(config.speculation, drafter=config.speculation.fallback)
    made = [
        make(asked, max_model_len=max_model_len, device=device, grammars=grammars, target=target)
        for asked in (config, msgspec.structs.replace(config, speculation=fallback))
    ]
    odds = config.speculation.synthetic_acceptance
    if odds is not None:
        made = [
            SyntheticDrafter(one, odds, vocab_size=vocab_size, max_model_len=max_model_len) if one is not None else None
            for one in made
        ]
    return made[0], made[1]


def _share(config: Config, role: str) -> float:
    """Of the memory of its GPU, for a worker of this pool."""
    pool: Pool = getattr(config.pools, role)
    return config.engine.gpu_memory_utilization * pool.gpu_part


def _device(config: Config) -> torch.device:
    wanted = config.engine.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)


def _transport(config: Config, worker: str, device: torch.device) -> Collective:
    host = node_address()
    timeout_s = config.coordinator.worker_timeout_s

    def place_of(end: End) -> Place:
        # By its future: this is no event loop, but Ray warns of a blocking get in any thread of an async actor.
        found = actor(actor_name(config.name, end.worker)).place.remote().future().result(timeout_s)
        assert isinstance(found, Place)
        return found

    make_group = partial(link, config.transfer, device=device, host=host, timeout_s=timeout_s)
    return Collective(worker, host, make_group, place_of, timeout_s=timeout_s)
