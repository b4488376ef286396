"""How long the coordinator's machine is at one event where a request's tree is large: workers wait for that.

Knows events of the timed simulator, which are recorded and played to a machine again. Nothing is sent here, and what is
on the way to an event and from it (`overhead` has that) is left out.
"""

from __future__ import annotations

import time
from statistics import median

from msgspec.msgpack import Decoder, Encoder

from distspec.bench.report import Row, machine, row
from distspec.bench.simulate import hardware
from distspec.coordinator.context import Settings
from distspec.coordinator.events import Event, FromWorker
from distspec.coordinator.machine import Machine
from distspec.protocol.messages import Drafted, Verdict
from distspec.sim.timed import Load, TimedWorld

BOUND_MS = 1.0
EVENTS: dict[type, str] = {Verdict: "verdict", Drafted: "drafted"}
SETTINGS = Settings(policy="ssd", steps=6, lookahead=7, branch_width=24, max_live_nodes=600, room=600)
"""Verdicts of up to 16 nodes; two drafts for each, which fill a tree of 600."""

_CURVES, _LOAD = "h200-32b-0.6b", Load(batch=1, odds=(0.8, 0.1, 0.03))


def measure(tokens: int, repetitions: int) -> list[Row]:
    """Milliseconds per event of one request of so many tokens, rows `overhead/ssd/{event}`, against the bound of a
    round: the median over all events of that kind in so many repetitions."""
    events, took_ms = recorded(tokens), {name: list[float]() for name in EVENTS.values()}
    decoder = Decoder[Event](Event)
    for _ in range(repetitions):
        played = Machine(SETTINGS, term=1)
        for data, now_s in events:
            event = decoder.decode(data)  # just now, as in life: caches have it
            began_s = time.perf_counter()
            played.handle(event, now_s)
            took_s = time.perf_counter() - began_s
            name = EVENTS.get(type(event.message)) if isinstance(event, FromWorker) else None
            if name is not None:
                took_ms[name].append(1e3 * took_s)
    context = machine("msgspec") | {"tokens": tokens, "repetitions": repetitions, "reference": "bound"}
    context["max_live_nodes"] = SETTINGS.max_live_nodes
    return [row(f"overhead/ssd/{name}", median(took), "ms/event", BOUND_MS, context) for name, took in took_ms.items()]


def recorded(tokens: int) -> list[tuple[bytes, float]]:
    """All events of a request of so many tokens, encoded, and when they came."""
    events, encode = list[tuple[bytes, float]](), Encoder().encode
    world = TimedWorld(
        hardware(_CURVES), SETTINGS, _LOAD, on_event=lambda event, now_s: events.append((encode(event), now_s))
    )
    world.run(tokens)
    return events
