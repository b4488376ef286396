"""When a kernel starts: on Hopper and later while the one before it ends, so that nobody waits for a launch.

Knows the device and Triton's launch options. Does not know kernels. This is programmatic dependent launch (CUDA C++
Programming Guide; in PTX, griddepcontrol), which CUDA graphs keep. A kernel that is launched with `early()` calls
`in_turn` in every program, before it writes anything and before it reads what the kernel before it may have written.
`in_turn` waits until that one is complete. The next one starts when the last program of this one has ended, not sooner:
told to start once this one had its turn, its programs took up multiprocessors that this one's still wanted, and whole
forwards were slower than without any of this (docs/log.md). So of three kernels in a row the first is complete when the
third starts: ahead of `in_turn`, a kernel may read weights and whatever else the kernel right before it does not write.
Kernels that are launched otherwise start when all before them are complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

_HOPPER = 90
_ALLOWED: ContextVar[bool] = ContextVar("early launches", default=True)


@triton.jit
def in_turn(EARLY: tl.constexpr):
    """From here on everything that earlier kernels wrote is there, and may be overwritten."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


def early() -> dict[str, bool]:
    """Options of a launch, for a kernel that calls `in_turn`."""
    if _ALLOWED.get() and not knobs.runtime.interpret and _able(driver.active.get_current_device()):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@contextmanager
def one_by_one() -> Iterator[None]:
    """Within, each kernel starts when the one before is complete, as anywhere before Hopper: to compare with."""
    token = _ALLOWED.set(False)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


@cache
def _able(device: int) -> bool:
    """device: the current one."""
    target = driver.active.get_current_target()
    return target.backend == "cuda" and int(target.arch) >= _HOPPER
