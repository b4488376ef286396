"""Idle shares of made-up intervals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from distspec.bench.trace import Trace


def event(name: str, kind: str, start: int, end: int, correlation: int) -> SimpleNamespace:
    values = {"name": name, "device_type": SimpleNamespace(name=kind), "start_ns": start, "correlation_id": correlation}
    values["duration_ns"] = end - start
    return SimpleNamespace(**{key: lambda value=value: value for key, value in values.items()})


def test_what_is_idle_and_who_was_early() -> None:
    trace = Trace()
    trace._digest(
        [
            event("cudaGraphLaunch", "CPU", 0, 2, 1),
            event("a", "CUDA", 10, 30, 1),
            event("b", "CUDA", 40, 50, 1),
            event("cudaGraphLaunch", "CPU", 45, 47, 2),
            event("copy", "CUDA", 55, 60, 9),
            event("a", "CUDA", 70, 110, 2),
            event("cudaGraphLaunch", "CPU", 120, 121, 3),
            event("a", "CUDA", 125, 135, 3),
        ]
    )
    assert trace.launched_ahead() == [True, False]
    assert trace.idle() == pytest.approx((10 + 5 + 10 + 15) / 125)
    assert trace.idle_between() == pytest.approx((5 + 10 + 15) / 125)
    assert trace.busy_s() == pytest.approx(85e-9 / 3)
