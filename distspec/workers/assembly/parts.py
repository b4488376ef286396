"""What target and draft workers are made of alike: drafters, grammars, transports, a share of a GPU.

Knows the configuration, folders of models, and how peers find each other. Does not know desks, or how large pools are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import torch

from distspec import models
from distspec.config import FEATURE_DRAFTERS, Config, Engine, Pool
from distspec.constraints import Compiler, Grammars
from distspec.drafters import GUESSERS, Drafter, make
from distspec.drafters.base import Called, never
from distspec.drafters.synthetic import SyntheticDrafter
from distspec.models.draft_checkpoint import DraftModel
from distspec.models.llama import Llama
from distspec.transfer.aside import Aside
from distspec.transfer.base import End
from distspec.transfer.collective import Collective
from distspec.transfer.links import link
from distspec.transfer.meeting import Place
from distspec.workers.names import actor, actor_name, node_address

log = logging.getLogger(__name__)


def taps_of(config: Config, shape: models.ModelConfig) -> tuple[int, ...]:
    """Where in the target the drafter wants its features read. All targets keep these: they go along with KV, and a
    remote drafter gets them from whoever computed them. Raises ConfigError, ModelNotFound."""
    spec = config.speculation
    if spec.drafter not in FEATURE_DRAFTERS or spec.draft_model is None:
        return ()
    return models.read_draft(spec.drafter, models.model_folder(spec.draft_model, models.DRAFT_FIELD), shape).taps


def grammars_of(config: Config, shape: models.ModelConfig, wake: Callable[[], None] = lambda: None) -> Grammars | None:
    """Of the model's tokenizer; None where it has none. wake: see Grammars."""
    folder = models.model_folder(config.model.name)
    if not (folder / models.TOKENIZER).is_file():
        return None

    def load() -> Compiler:
        tokenizer = models.load_tokenizer_folder(folder)
        return Compiler(tokenizer, shape.vocab_size, models.stop_ids(tokenizer, shape.eos_token_ids))

    return Grammars(load, wake)


def drafters_of(
    config: Config,
    model: Llama | DraftModel | None,
    max_model_len: int,
    vocab_size: int,
    device: torch.device,
    grammars: Grammars | None,
    is_called: Called = never,
) -> tuple[Drafter | None, Drafter | None]:
    """The drafter and its fallback, which has no model. model, is_called: see drafters.make; vocab_size: of the
    target."""

    def made(config: Config, model: Llama | DraftModel | None) -> Drafter | None:
        one = make(config, model, max_model_len=max_model_len, device=device, grammars=grammars, is_called=is_called)
        odds = config.speculation.synthetic_acceptance
        if one is None or odds is None or config.speculation.drafter in GUESSERS:
            return one
        return SyntheticDrafter(one, odds, vocab_size=vocab_size, max_model_len=max_model_len)

    fallback = msgspec.structs.replace(config.speculation, drafter=config.speculation.fallback)
    return made(config, model), made(msgspec.structs.replace(config, speculation=fallback), None)


@contextmanager
def captures(options: Engine, device: torch.device) -> Iterator[None]:
    """Tell what it took in time and memory of a GPU to capture graphs."""
    if device.type != "cuda" or not options.cuda_graphs:
        yield
        return
    start, (before, _) = time.perf_counter(), torch.cuda.mem_get_info(device)
    yield
    seconds, (after, _) = time.perf_counter() - start, torch.cuda.mem_get_info(device)
    log.info("CUDA graphs captured in %.1f s; they took %.2f GiB", seconds, (before - after) / 2**30)


def share_of(config: Config, role: str) -> float:
    """Of the memory of its GPU, for a worker of this pool."""
    pool: Pool = getattr(config.pools, role)
    return config.engine.gpu_memory_utilization * pool.gpu_part


def prove(device: torch.device) -> None:
    """That the device computes for this process. Raises what the device says: after some errors, as a kernel that read
    where nothing is, CUDA does so whatever it is asked until the process ends (cudaErrorIllegalAddress and others of
    the runtime API).

    From any thread. It takes no memory, and waits for no stream that computes: one may be in the midst of a capture.
    """
    with Aside(device)():
        pass


def transport_of(config: Config, worker: str, device: torch.device) -> Collective:
    host = node_address()
    timeout_s = config.coordinator.worker_timeout_s

    def place_of(end: End) -> Place:
        # By its future: this is no event loop, but Ray warns of a blocking get in any thread of an async actor.
        found = actor(actor_name(config.name, end.worker)).place.remote().future().result(timeout_s)
        assert isinstance(found, Place)
        return found

    make_group = partial(link, config.transfer, device=device, host=host, timeout_s=timeout_s)
    return Collective(worker, host, make_group, place_of, timeout_s=timeout_s)
