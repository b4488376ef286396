"""Pages straight out of another pool, against plain torch; tests/gpu runs the same check compiled."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from distspec.kernels.pull import pull_pages, wait_for
from distspec.kv.pool import KVPool
from tests.unit.kernels.test_elementwise import CPU

pytestmark = pytest.mark.needs("interpreter")


def pool(pages: int, size: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> KVPool:
    kv_heads, head_dim, features = shape
    made = KVPool(3, pages * size, kv_heads, head_dim, features=features, dtype=dtype, device=device)
    made.data.normal_()
    made.features.normal_()
    return made


def check_pull(
    count: int, shape: tuple[int, int, int], sizes: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Pools of other sizes, with pages of other sizes."""
    pools, spots, rows = [], [], []
    for size, offset in zip(sizes, (3 % sizes[0], 1 % sizes[1]), strict=True):
        pages = torch.randperm(-(-(count + offset) // size) + 2)
        pools.append(pool(len(pages), size, shape, dtype, device))
        spots.append((pages[: -(-(count + offset) // size)].tolist(), offset, size))
        rows.append(torch.tensor([page * size + i for page in pages.tolist() for i in range(size)])[offset:][:count])
    mine, theirs = pools
    data, features = mine.data.clone(), mine.features.clone()
    here, there = rows[0].to(device), rows[1].to(device)
    data[:, :, here], features[here] = theirs.data[:, :, there], theirs.features[there]
    addresses = [each.data_ptr() for each in (theirs.data, theirs.features) if each.numel()]
    pull_pages(mine.data, mine.features, spots[0], addresses, theirs.data.shape[2], spots[1], count)
    assert torch.equal(mine.data, data)
    assert torch.equal(mine.features, features)


@pytest.mark.parametrize("count", [0, 1, 4, 21])
@pytest.mark.parametrize("shape", [(1, 8, 0), (2, 6, 0), (3, 4, 10), (2, 8, 100)])
@pytest.mark.parametrize("sizes", [(1, 16), (16, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_come_straight_from_another_pool(
    count: int, shape: tuple[int, int, int], sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    check_pull(count, shape, sizes, dtype, CPU)


_LONG = 1 << 23
"""Turns of a wait: on a GPU ten seconds or so, in which it has to hear of something."""


def check_wait(device: torch.device) -> None:
    """It ends when the count is there, when the host says so, and when its turns are over, and tells the count."""
    pinned = device.type == "cuda"
    counter = torch.full((1,), 4, dtype=torch.int64, device=device)
    stop, found = torch.zeros(2, 1, dtype=torch.int64, pin_memory=pinned)
    # Made before there is a wait: for what is done for the first time, a driver may wait until its device is idle.
    aside = torch.cuda.stream(torch.cuda.Stream(device)) if pinned else nullcontext()  # type: ignore[no-untyped-call]

    def waited(count: int, turns: int) -> int:
        found.zero_()
        wait_for(counter.data_ptr(), count, stop, found, turns)
        if pinned:
            torch.cuda.current_stream().synchronize()
        return int(found)

    def count_on() -> None:
        with aside:
            counter.fill_(6)

    assert waited(4, _LONG) == 4
    assert waited(0, _LONG) == 4
    assert waited(5, 50) == 4
    for end in (partial(stop.fill_, 1), count_on):
        timer = threading.Timer(0.1, end)
        timer.start()
        found_count = waited(5, _LONG)
        timer.join()
        assert found_count == int(counter)
        stop.zero_()
    assert int(counter) == 6


def test_a_wait_ends_with_the_count_or_a_word_of_the_host_or_its_turns() -> None:
    check_wait(CPU)
