"""Copies do not wait for the device, however large they are."""

from __future__ import annotations

import pytest
import torch

from distspec.copies import integers, put, to_host

pytestmark = pytest.mark.needs("gpu")
CUDA = torch.device("cuda")
COUNT = 2**18  # the driver takes in copies of ordinary memory up to some ten thousand bytes before they are made


def test_the_host_goes_on_while_the_device_is_busy() -> None:
    place, busy = torch.zeros(COUNT, dtype=torch.int64, device=CUDA), torch.cuda.Event()
    integers([0] * COUNT, CUDA), to_host(place)  # memory is pinned for the first time, for which the driver waits
    put([0] * COUNT, place)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    busy.record()
    found = integers(range(COUNT), CUDA)
    put(range(COUNT), place)
    back = to_host(found)
    assert not busy.query()
    torch.cuda.synchronize()
    assert back.tolist() == place.tolist() == list(range(COUNT))
