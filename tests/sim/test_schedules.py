"""Thousands of seeded schedules: reordering, delay, deaths, freezes, drains, lost transfers, a dying coordinator.

`World.run` checks after every event that pages are conserved, transitions legal and no live verdict lost, and
at the end that every request got one terminal message and exactly the plain target's tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from distspec.coordinator.events import Command, Event
from distspec.coordinator.journal import Journal
from distspec.coordinator.replay import replay
from distspec.sim.plan import random_plan
from distspec.sim.world import World

SCHEDULES = 4000
CHUNK = 500


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_every_schedule_gives_the_plain_tokens(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        world = World(random_plan(seed), seed)
        try:
            streams = world.run()
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        seen.update(world.machine.snapshot()["counters"])
        seen.update(stream.finished for stream in streams.values())
        seen["terms"] += world.term - 1
    # Schedules in which nothing goes wrong would prove nothing.
    kinds = ("requeued", "transfers_lost", "features_lost", "workers_lost", "bad_drafts", "terms")
    for kind in (*kinds, "stop", "length", "abort"):
        assert seen[kind], f"no schedule of this chunk had any {kind}: {seen}"


def _history(seed: int) -> list[bytes]:
    out: list[bytes] = []

    def note(term: int, event: Event, now: float, commands: list[Command]) -> None:
        out.append(msgspec.msgpack.encode((term, event, now, commands)))

    World(random_plan(seed), seed, on_event=note).run()
    return out


@pytest.mark.parametrize("seed", range(20))
def test_the_seed_decides_everything(seed: int) -> None:
    assert _history(seed) == _history(seed)


def test_a_coordinator_that_dies_with_leases_out_loses_and_repeats_nothing() -> None:
    deaths = 0
    for seed in range(100):
        plan = replace(random_plan(seed), coordinator_deaths=2, requests=5)
        world = World(plan, seed)
        world.run()
        deaths += world.term - 1
    assert deaths > 100


@pytest.mark.parametrize("seed", range(30))
def test_a_journal_replays_to_the_same_commands(seed: int, tmp_path) -> None:
    plan = replace(random_plan(seed), coordinator_deaths=0)
    path = tmp_path / "journal"
    journal = Journal(path, 10_000_000, plan.settings, 1)
    World(plan, seed, on_event=lambda term, event, now, commands: journal.write(now, event, commands)).run()
    journal.close()
    result = replay(path)
    assert result.divergence is None
    assert result.events > 5


def test_links_that_always_fail_cost_each_request_one_detour() -> None:
    for seed in range(100):
        plan = replace(
            random_plan(seed),
            roles=("prefill", "decode", "verify", "draft"),
            transfer_loss=1.0,
            **dict.fromkeys(("deaths", "freezes", "drains", "coordinator_deaths"), 0),
            pages=400,
        )
        world = World(plan, seed)
        world.run()
        assert world.machine.snapshot()["counters"].get("requeued", 0) <= plan.requests
