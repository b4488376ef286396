"""The pool, the largest step and the driver stay inside the worker's share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distspec import config
from distspec.engine.sizing import DRIVER_BYTES, Memory, Work, pages_that_fit, pages_within, sized
from distspec.errors import InvalidValue, TooLittleMemory
from distspec.kv.pool import KVPool
from tests.shapes import SMALLEST

GIB = 2**30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = replace(SMALLEST, num_layers=64, max_position=2**20)

bytes_ = st.integers(0, 140 * GIB)
memories = st.builds(lambda total, free, held: Memory(total, min(free, total), held), bytes_, bytes_, bytes_)
works = st.builds(Work, peak=st.integers(0, 20 * GIB), position=st.integers(1, 2**20))
shares = st.floats(0.01, 1.0)


@given(memories, works, shares, st.integers(1, 2**17))
def test_all_the_share_has_room_for_and_no_more(memory: Memory, work: Work, share: float, least: int) -> None:
    options = config.Engine()
    page = work.position * options.page_size
    room = min(int(share * memory.total) - memory.held - DRIVER_BYTES, memory.free)
    need = work.peak + options.pages_for(least) * page
    if need > room:
        with pytest.raises(TooLittleMemory) as raised:
            pages_within(memory, share, work, options, least)
        assert raised.value.missing == need - room
    else:
        pages = pages_within(memory, share, work, options, least)
        assert pages >= options.pages_for(least)
        assert work.peak + pages * page <= room < work.peak + (pages + 1) * page


@given(works, st.lists(st.integers(0, 30 * GIB), min_size=2, max_size=4), st.floats(0.3, 1.0))
def test_workers_that_share_a_gpu_by_fractions_all_fit(work: Work, weights: list[int], all_: float) -> None:
    """Whoever comes first, and whether or not the others have taken theirs by then."""
    total, free = 140 * GIB, 140 * GIB
    options, share = config.Engine(), all_ / len(weights)
    for held in weights:
        free -= held + DRIVER_BYTES
        try:
            pages = pages_within(Memory(total, max(0, free), held), share, work, options, least=1)
        except TooLittleMemory:
            free += held + DRIVER_BYTES  # it is gone
            continue
        free -= work.peak + pages * work.position * options.page_size
        assert free >= 0


def test_an_error_says_how_much_is_missing_and_what_to_lower() -> None:
    work, options = Work(peak=2 * GIB, position=2**18), config.Engine()
    with pytest.raises(TooLittleMemory) as raised:
        pages_within(Memory(total=80 * GIB, free=50 * GIB, held=38 * GIB), 0.5, work, options, least=4096 - 64 - 32)
    text = str(raised.value)
    assert raised.value.path == "engine.gpu_memory_utilization"
    assert "0.5 of 80.00 GiB lacks 2.00 GiB" in text  # 38 + 1 + 2 + 1 of 40
    assert "raise it" in text
    for key in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "max_scratch_nodes"):
        assert key in text


def test_an_error_says_who_has_the_rest() -> None:
    work, options = Work(peak=2 * GIB, position=2**18), config.Engine()
    with pytest.raises(TooLittleMemory, match=r"others hold 69\.00 GiB") as raised:
        pages_within(Memory(total=80 * GIB, free=1 * GIB, held=10 * GIB), 0.5, work, options, least=4096 - 64 - 32)
    assert raised.value.missing == 2 * GIB


def never(options: config.Engine) -> Iterable[KVPool]:
    raise AssertionError("nothing is to be seen here")


def test_what_is_configured_or_on_a_cpu_needs_no_rehearsal() -> None:
    chosen, open_ = config.Engine(num_pages=7), config.Engine()
    assert sized(chosen, CUDA, share=1.0, longest=64, least=64, play=never) is chosen
    assert sized(open_, CPU, share=1.0, longest=64, least=64, play=never) is open_


def test_on_a_gpu_a_pool_has_a_size() -> None:
    with pytest.raises(InvalidValue, match=r"engine\.num_pages"):
        pages_that_fit(SHAPE, config.Engine(), 64, torch.bfloat16, CUDA)


def test_features_leave_room_for_fewer_pages() -> None:
    options, longest = config.Engine(page_size=16), 2**14
    plain, tapped = (pages_that_fit(SHAPE, options, longest, torch.float32, CPU, width) for width in (0, 1024))
    assert tapped == plain // 2
