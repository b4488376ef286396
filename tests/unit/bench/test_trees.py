"""Events of large trees, played to a machine again: it does what it did, and rows are of all kinds that are timed."""

from __future__ import annotations

from msgspec.msgpack import decode

from distspec.bench import trees
from distspec.coordinator.events import Event, FromWorker
from distspec.coordinator.machine import Machine


def test_there_is_a_row_for_each_kind_of_event() -> None:
    rows = trees.measure(tokens=30, repetitions=1)
    assert [one.name for one in rows] == ["overhead/ssd/verdict", "overhead/ssd/drafted"]
    assert all(one.value > 0 and one.ratio == one.value / one.reference for one in rows)


def test_trees_are_as_large_as_they_are_said_to_be_while_events_are_played() -> None:
    played, most = Machine(trees.SETTINGS, term=1), 0
    for data, now_s in trees.recorded(tokens=60):
        event = decode(data, type=Event)
        played.handle(event, now_s)
        if isinstance(event, FromWorker):
            request = played.request(1)
            assert request is not None
            most = max(most, len(request.tree))
    assert most == trees.SETTINGS.max_live_nodes
    assert request.emitted >= 60
