"""How many KV pages fit.

Knows bytes: of a device, of one position, and what was seen to be taken of them. Does not know requests, or what it is
that takes them.

On a GPU the pool gets what is left of the worker's share beside all else. What else there is, is seen and not foretold:
the same models do their largest steps over a small pool first, their graphs captured (`rehearsed`), as vLLM profiles a
run. By its own allocator a process sees what is its own, so that several workers that start at once on one GPU do not
count each other's.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import msgspec
import torch

from distspec import config
from distspec.errors import InvalidValue, TooLittleMemory
from distspec.kv.pool import KVPool
from distspec.models.config import ModelConfig

log = logging.getLogger(__name__)

_CPU_BYTES = 512 * 2**20
"""Pool of one CPU worker unless one request needs more: several workers share a laptop."""

_CPU_SHARE = 0.25
"""Of the host's memory, at most. Pages that were never written take no memory yet."""

DRIVER_BYTES = 2**30
"""Left to what the allocator of a process does not see: the driver's context, kernels, graphs, buffers of libraries."""

_TEXT_BYTES = 64
"""For each token of the longest text in each slot. A small pool takes short texts alone, so what grows with them is not
rehearsed: page tables, and texts with all that finds matches in them where prompt lookup rolls."""

SHORT = 32
"""Tokens of a text that takes a slot for a few rounds, where these are rehearsed."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a device, in bytes: all of it, what nobody has, and what the tensors of this process have."""

    total: int
    free: int
    held: int


@dataclass(frozen=True, slots=True)
class Work:
    """What workers need beside their pools, in bytes at its peak; position: what the pools keep of one position."""

    peak: int
    position: int


def pages_that_fit(
    model: ModelConfig,
    options: config.Engine,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    features: int = 0,
) -> int:
    """Pages for one pool: as configured, or on a CPU from the host's memory, and then no more than all slots can use.

    features: values kept of each position beside its KV. Raises InvalidValue (a ConfigError) if not one page is left,
    or on a GPU where nobody configured or found the number: see `sized`.
    """
    if options.num_pages is not None:
        return options.num_pages
    if device.type != "cpu":
        raise InvalidValue("engine.num_pages", None, "a number: on a GPU engine.sizing.sized finds it")
    page = options.page_size * KVPool.position_bytes(
        model.num_layers, model.num_kv_heads, model.head_dim, dtype, features, model.kv_latent
    )
    one = options.pages_for(max_model_len)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fit = min(max(_CPU_BYTES, one * page), int(_CPU_SHARE * memory)) // page
    if fit < 1:
        raise InvalidValue("engine.page_size", options.page_size, "room for one KV page in a quarter of the memory")
    return min(fit, one * options.max_num_seqs)


def pages_that_serve(
    model: ModelConfig,
    options: config.Engine,
    max_model_len: int | None,
    dtype: torch.dtype,
    device: torch.device,
    features: int = 0,
) -> int:
    """As `pages_that_fit`, with room for a request of the model's length, or of any if that is None.

    Raises InvalidValue, which names the key that would help: the pool's size where it is configured, else what memory
    leaves too little for.
    """
    if max_model_len is not None and max_model_len > model.max_position:
        raise InvalidValue("model.max_model_len", max_model_len, f"at most {model.max_position}, the model's own")
    pages = pages_that_fit(model, options, max_model_len or model.max_position, dtype, device, features)
    need = options.pages_for(max_model_len or 1)
    if pages >= need:
        return pages
    if options.num_pages is not None:
        raise InvalidValue("engine.num_pages", pages, f">= {need} to hold a request and its scratch nodes")
    if max_model_len is not None and (room := options.tokens_in(pages)):
        raise InvalidValue("model.max_model_len", max_model_len, f"at most {room}: memory holds {pages} KV pages")
    raise InvalidValue("engine.max_scratch_nodes", options.max_scratch_nodes, f"fewer: memory holds {pages} KV pages")


def pool_of(model: ModelConfig, locations: int, features: int, dtype: torch.dtype, device: torch.device) -> KVPool:
    """For the keys and values of a model, and so many values beside them."""
    kept = (model.num_kv_heads, model.head_dim)
    return KVPool(
        model.num_layers, locations, *kept, latent=model.kv_latent, features=features, dtype=dtype, device=device
    )


def sized(
    options: config.Engine,
    device: torch.device,
    *,
    share: float,
    longest: int,
    least: int,
    play: Callable[[config.Engine], Iterable[KVPool]],
) -> config.Engine:
    """The options with num_pages, for each pool that `play` makes, if it is not configured and the device is a GPU.

    share: of the GPU's memory, for all of this process. longest: tokens of a request; no more pages are taken than all
    slots then use. least: tokens of a request that there must be room for. play: makes what will run with the options
    it is given, has it do its largest steps, and returns its pools; it is called once, after everything that stays was
    loaded. Raises TooLittleMemory.
    """
    if options.num_pages is not None or device.type != "cuda":
        return options
    work = rehearsed(device, lambda: play(msgspec.structs.replace(options, num_pages=few(options))))
    if not work.position:
        return options
    work = replace(work, peak=work.peak + _TEXT_BYTES * longest * options.max_num_seqs)
    memory = memory_of(device)
    fit = pages_within(memory, share, work, options, least)
    pages = min(fit, options.pages_for(longest) * options.max_num_seqs)
    log.info(
        "%d KV pages are %s of a share of %g of %s; weights have %s, the largest step and CUDA graphs took %s",
        pages,
        _gib(pages * options.page_size * work.position),
        share,
        _gib(memory.total),
        _gib(memory.held),
        _gib(work.peak),
    )
    return msgspec.structs.replace(options, num_pages=pages)


def pages_within(memory: Memory, share: float, work: Work, options: config.Engine, least: int) -> int:
    """Pages for which a worker's share of a device has room, and the device too. Raises TooLittleMemory where a request
    of `least` tokens would not fit."""
    own = int(share * memory.total) - DRIVER_BYTES - memory.held
    room = min(own, memory.free) - work.peak
    page = work.position * options.page_size
    pages, need = room // page, options.pages_for(least)
    if pages >= need:
        return pages
    needs = (
        f"weights {_gib(memory.held)}, the driver {_gib(DRIVER_BYTES)}, the largest step and CUDA graphs "
        f"{_gib(work.peak)}, KV of a request of {least} tokens {_gib(need * page)}"
    )
    way = "raise it, or num_gpus of a pool that asks for a part of a GPU"
    if memory.free < own:
        way = f"others hold {_gib(memory.total - memory.free - memory.held)}: end these"
    raise TooLittleMemory(
        "engine.gpu_memory_utilization",
        f"{share:g} of {_gib(memory.total)} lacks {_gib(need * page - room)} ({needs}); {way}",
        need * page - room,
    )


def ran_out(device: torch.device, options: config.Engine) -> TooLittleMemory:
    """What to say where a GPU runs out of memory while a worker is made."""
    free, total = torch.cuda.mem_get_info(device)
    path = "engine.gpu_memory_utilization" if options.num_pages is None else "engine.num_pages"
    taken = f"this worker took {_gib(torch.cuda.max_memory_allocated(device))}, {_gib(free)} are left"
    return TooLittleMemory(path, f"a GPU of {_gib(total)} ran out of memory: {taken}; take a smaller model or pool")


def rehearsed(device: torch.device, play: Callable[[], Iterable[KVPool]]) -> Work:
    """What `play` takes at its peak on a GPU beyond what is there before; nothing of it is left. It returns the pools
    that it made, which are not counted."""
    before = _settled(device)
    torch.cuda.reset_peak_memory_stats(device)
    sizes = [_sizes(pool) for pool in play()]
    torch.cuda.synchronize(device)
    # What is reserved, not what is allocated: the allocator keeps what it once took, and so will that of the worker.
    peak = torch.cuda.max_memory_reserved(device) - before
    _settled(device)
    return Work(peak=max(0, peak - sum(whole for whole, _ in sizes)), position=sum(each for _, each in sizes))


def memory_of(device: torch.device) -> Memory:
    """Of a GPU, now."""
    held = _settled(device)
    free, total = torch.cuda.mem_get_info(device)
    return Memory(total=total, free=free, held=held)


def few(options: config.Engine) -> int:
    """Pages for the largest steps: a chunk of a prompt, or a text of SHORT tokens in each slot with all its nodes."""
    return max(options.pages_for(options.max_num_batched_tokens), options.max_num_seqs * options.pages_for(SHORT))


def _settled(device: torch.device) -> int:
    """Bytes of this process's tensors, when the allocator has given back all else."""
    gc.collect()  # graphs and what they captured may hang in cycles
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def _sizes(pool: KVPool) -> tuple[int, int]:
    """Bytes of a pool, and of one position in it."""
    return pool.data.nbytes + pool.features.nbytes, pool.width * pool.data.itemsize


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
