"""What a worker is made of: its model or drafter, its desk, its transport. All that is heavy to import is here.

Knows the configuration, the device and Ray's addresses. Does not know the channel.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from distspec.config import Config
from distspec.drafters.base import Called, never
from distspec.engine.capture import is_out_of_memory
from distspec.engine.sizing import ran_out
from distspec.protocol.messages import Hello
from distspec.transfer.meeting import Place
from distspec.workers.assembly.draft import draft_work
from distspec.workers.assembly.parts import prove
from distspec.workers.assembly.target import target_work
from distspec.workers.compute import Later, Work
from distspec.workers.fingerprint import fingerprint
from distspec.workers.names import node_address

__all__ = ["Built", "build"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """hello: with incarnation 0, to be replaced. place: where peers meet a target worker. begin: to be called on the
    thread that computes, since torch's number of threads is each thread's own. prove: that its device computes; raises
    what the device says."""

    work: Work
    hello: Hello
    place: Place | None
    begin: Callable[[], None]
    prove: Callable[[], None]


def build(
    config: Config, worker: str, threads: int, later: Callable[[Later], None], is_called: Called = never
) -> Built:
    """Load the worker `pool:index`. later: runs an action on its compute thread; is_called: asked there, within a step.

    threads: torch's in this process; -n shares the host's cores among n such workers, to load, and to compute if there
    is no GPU. Raises ConfigError, ModelNotFound, or what the device says.
    """
    torch.set_num_threads(threads if threads > 0 else max(1, len(os.sched_getaffinity(0)) // -threads))
    device = _device(config, worker.partition(":")[0])
    # Where a GPU computes, the host fills masks and copies: waking threads for these takes longer than they do.
    begin = partial(torch.set_num_threads, 1 if threads < 0 and device.type == "cuda" else torch.get_num_threads())
    work: Work
    place: Place | None = None
    try:
        if worker.startswith("draft:"):
            work, hello = draft_work(config, worker, device, later, is_called)
        else:
            work, hello, place = target_work(config, worker, device, later)
    except RuntimeError as error:
        if device.type != "cuda" or not is_out_of_memory(error):
            raise
        raise ran_out(device, config.engine) from error
    hello = msgspec.structs.replace(hello, fingerprint=fingerprint(config, device), node=node_address())
    return Built(work, hello, place, begin, partial(prove, device))


def _device(config: Config, role: str) -> torch.device:
    """Where a worker of this pool computes. `auto` is a GPU only if Ray was asked for one: whoever asks for none sees
    all, and would share the first with every other such worker, each with the whole of its memory in mind."""
    if config.engine.device != "auto":
        return torch.device(config.engine.device)
    asks, is_there = config.asks_for_gpu(role), torch.cuda.is_available()
    if asks and not is_there:
        log.warning("pools.%s asks for GPUs, but torch finds none: it computes on the CPU", role)
    return torch.device("cuda" if asks and is_there else "cpu")
