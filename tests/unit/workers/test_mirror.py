"""What Ray shows is what the registry holds."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import suppress
from typing import Any

import pytest

from distspec.metrics import Family, Registry
from distspec.workers import mirror
from distspec.workers.mirror import Mirror


class Shown:
    """Records what Ray metrics are told, by name and tags."""

    totals: defaultdict[tuple[str, str], float]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._name, self._keys = name, tag_keys

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self._keys)
        self.totals[self._name, str(tags)] += value

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self._keys)
        self.totals[self._name, str(tags)] = value


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> defaultdict[tuple[str, str], float]:
    Shown.totals = defaultdict(float)
    monkeypatch.setattr(mirror, "Counter", Shown)
    monkeypatch.setattr(mirror, "Gauge", Shown)
    return Shown.totals


def test_totals_agree_after_every_publication(shown: Any) -> None:
    registry, made = Registry(), Mirror("f")
    tokens = registry.counter("tokens", "t", ["role"])
    queued = registry.gauge("queued", "q")
    took = registry.histogram("took", "t", bounds=(1.0,))
    for i in range(1, 4):
        tokens.add(10 * i, role="decode")
        queued.set(5 - i)
        took.observe(2.0)
        made.publish(registry.snapshot())
        made.publish(registry.snapshot())
        assert shown["tokens", "{'role': 'decode', 'fleet': 'f'}"] == 10 * i * (i + 1) / 2
        assert shown["queued", "{'fleet': 'f'}"] == 5 - i
        assert shown["took_sum", "{'fleet': 'f'}"] == 2.0 * i
        assert shown["took_count", "{'fleet': 'f'}"] == i


async def test_what_failed_once_is_told_and_made_up_for(
    shown: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever it failed: where the values are read, or where Ray is told of one."""
    registry, reads = Registry(), 0
    registry.counter("tokens", "t").add(10)
    registry.counter("requests", "r").add(1)
    tell, told = Shown.inc, 0

    def inc(self: Shown, value: float, tags: dict[str, str]) -> None:
        nonlocal told
        told += 1
        if told == 2:
            raise ValueError("no connection")
        tell(self, value, tags)

    def families() -> list[Family]:
        nonlocal reads
        reads += 1
        if reads == 1:
            raise KeyError("not yet")
        if reads == 5:
            raise asyncio.CancelledError
        return registry.snapshot()

    monkeypatch.setattr(Shown, "inc", inc)
    with caplog.at_level(logging.WARNING), suppress(asyncio.CancelledError):
        await Mirror("f").follow(families, 0.0)
    assert reads == 5
    assert shown == {("tokens", "{'fleet': 'f'}"): 10, ("requests", "{'fleet': 'f'}"): 1}
    assert [record.args[0] for record in caplog.records if record.args] == ["KeyError", "ValueError"]
