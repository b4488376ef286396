"""Workers stay inside their shares of a GPU: pools, graphs, the largest steps, and what the driver has."""

from __future__ import annotations

import multiprocessing
from functools import partial
from multiprocessing.connection import Connection

import pytest
import torch
from msgspec import structs

from distspec.config import Config, load
from distspec.drafters import draft_model
from distspec.engine.rehearsal import rehearse
from distspec.engine.sizing import DRIVER_BYTES, memory_of, rehearsed
from distspec.errors import TooLittleMemory
from distspec.kv.pool import KVPool
from distspec.models import load_model
from distspec.models.llama import Llama
from distspec.workers.assembly import build
from distspec.workers.assembly.target import Assembled, assembled, target_sized
from distspec.workers.rehearsal import rehearse_desk

pytestmark = pytest.mark.needs("gpu")
CUDA = torch.device("cuda")
NAME = "random:qwen3-0.6b"
SHARES = (0.2, 0.35)


def configured(share: float) -> Config:
    """More slots than memory has room for."""
    tree = {
        "model": {"name": NAME, "max_model_len": 32768},
        "engine": {
            "device": "cuda",
            "gpu_memory_utilization": share,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 2048,
        },
        "speculation": {
            "placement": "local",
            "policy": "sd",
            "allowed_policies": ["ar", "sd"],
            "drafter": "standalone",
            "draft_model": NAME,
            "num_speculative_tokens": 3,
            "synthetic_acceptance": [0.8],
        },
    }
    return load(tree)


def target() -> Llama:
    return load_model(NAME, dtype=torch.bfloat16, device=CUDA)


def worker(share: float, told: Connection) -> None:
    """A process of its own: it is made, does its largest steps for real, and tells (bytes reserved at its peak, of its
    pools, of the device); and keeps all until it is answered."""
    config, model = configured(share), target()
    draft = draft_model(config, device=CUDA, target=model)
    assemble = partial(assembled, role="decode", model=model, draft=draft, device=CUDA, grammars=None)
    config = target_sized(config, "decode", model, CUDA, assemble)
    made: Assembled = assemble(config)
    made.desk.prepare(made.steps)
    small = structs.replace(config.model, max_model_len=None)
    for _ in range(2):
        rehearse(made.engine, config.engine)
        rehearse_desk(made.desk, made.engine, structs.replace(config, model=small), made.drafts)
    torch.cuda.synchronize()
    pools = sum(pool.data.nbytes + pool.features.nbytes for pool in made.pools)
    told.send((torch.cuda.max_memory_reserved(), pools, torch.cuda.mem_get_info()[1]))
    told.recv()


def _used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_two_workers_that_start_at_once_share_a_gpu_by_fractions() -> None:
    processes = multiprocessing.get_context("spawn")
    before = _used()
    ends = [processes.Pipe() for _ in SHARES]
    running = [
        processes.Process(target=worker, args=(share, end), daemon=True)
        for share, (_, end) in zip(SHARES, ends, strict=True)
    ]
    for process, (_, end) in zip(running, ends, strict=True):
        process.start()
        end.close()  # or a worker that breaks would be waited for
    found: list[tuple[int, int, int]] = [ours.recv() for ours, _ in ends if ours.poll(300)]
    used = _used() - before
    for ours, _ in ends:
        ours.send(None)
    for process in running:
        process.join()
    assert len(found) == len(SHARES)
    reserved = 0
    for share, (peak, pools, total) in zip(SHARES, found, strict=True):
        room = share * total - DRIVER_BYTES
        print(f"share {share}: {room / 2**30:.2f} GiB without the driver, peak {peak / 2**30:.2f}, "
              f"pools {pools / 2**30:.2f}")  # fmt: skip
        assert peak <= room
        assert peak >= 0.95 * room
        reserved += peak
    driver = (used - reserved) / len(SHARES)
    print(f"the driver has {driver / 2**30:.2f} GiB of each")
    assert driver <= DRIVER_BYTES


def test_a_rehearsal_leaves_nothing() -> None:
    config, model = configured(0.5), target()
    draft = draft_model(config, device=CUDA, target=model)
    before = memory_of(CUDA).held
    small = structs.replace(config.engine, num_pages=400)
    bare = structs.replace(config, engine=small, model=structs.replace(config.model, max_model_len=None))

    def play() -> list[KVPool]:
        made = assembled(bare, "decode", model, draft, CUDA, None)
        made.desk.prepare(made.steps, only_largest=True)
        rehearse(made.engine, small)
        rehearse_desk(made.desk, made.engine, bare, made.drafts)
        return made.pools

    work = rehearsed(CUDA, play)
    assert work.peak > 0
    assert memory_of(CUDA).held - before < 2**28  # workspaces of cuBLAS stay


def test_a_share_that_is_too_small_says_what_is_missing() -> None:
    config, model = configured(0.02), target()
    draft = draft_model(config, device=CUDA, target=model)
    assemble = partial(assembled, role="decode", model=model, draft=draft, device=CUDA, grammars=None)
    with pytest.raises(TooLittleMemory, match=r"lacks \d+\.\d\d GiB") as raised:
        target_sized(config, "decode", model, CUDA, assemble)
    assert raised.value.missing is not None
    assert raised.value.missing > 0


def test_a_pool_that_is_too_large_is_named() -> None:
    config = configured(0.9)
    large = structs.replace(config, engine=structs.replace(config.engine, num_pages=10**6))
    with pytest.raises(TooLittleMemory, match=r"engine\.num_pages: .* ran out of memory"):
        build(large, "decode:0", 1, lambda action: None)
