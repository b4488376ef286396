"""Which kernels may start early, and that each of them waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from distspec.kernels import launch
from tests.compiled import writes_too_soon

WAIT = "griddepcontrol.wait; // dummy"
WRITES = ["st.global.b32 [%rd1], {%r1};", "@%p1 st.global.v4.b32 [%rd1], {%r1};", "atom.global.add.s32 %r1, [%rd1], 1;"]


class _Driver:
    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def other_devices() -> Iterator[None]:
    launch._able.cache_clear()
    yield
    launch._able.cache_clear()


@pytest.mark.parametrize(
    ("target", "able"),
    [
        (GPUTarget("cuda", 80, 32), False),
        (GPUTarget("cuda", 90, 32), True),
        (GPUTarget("cuda", 120, 32), True),
        (GPUTarget("hip", "gfx942", 64), False),
    ],
)
def test_launches_are_early_from_hopper_on(target: GPUTarget, able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.setattr(driver, "_active", _Driver(target))
    assert launch.early() == ({"EARLY": True, "launch_pdl": True} if able else {"EARLY": False})
    with launch.one_by_one():
        assert launch.early() == {"EARLY": False}
    assert launch.early()["EARLY"] is able


@pytest.mark.needs("interpreter")
def test_the_interpreter_launches_nothing_early() -> None:
    assert launch.early() == {"EARLY": False}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_ahead_of_the_wait_is_found(write: str) -> None:
    read = "ld.global.b32 {%r1}, [%rd2];"
    assert not writes_too_soon("\n".join((read, WAIT, write)))
    assert writes_too_soon("\n".join((read, write, WAIT)))
    assert writes_too_soon("\n".join((read, write)))
