"""A bench for the coordinator's machine: events in, what it commands out as (to whom, message) pairs."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

from msgspec.structs import replace

from distspec.coordinator import events
from distspec.coordinator.context import Settings
from distspec.coordinator.events import Event
from distspec.coordinator.machine import Machine
from distspec.protocol.messages import (
    Cancel,
    Draft,
    Drafted,
    Drop,
    Extend,
    Freed,
    Hello,
    Message,
    Output,
    Submit,
    Verdict,
)
from distspec.protocol.values import ROOT, Node, SamplingParams, Shape, SpeculationChoice, Usage

Row = tuple[Event, list[tuple[str, Any]]]
"""An event, and all that has to come of it."""

PROMPT = (5, 6, 7)


class Bench:
    """A worker's role is its name without digits. Suspects come out as (worker, "suspect")."""

    def __init__(self, *workers: str, **settings: Any) -> None:
        self.settings = Settings(**{"steps": 2, "lookahead": 1, "room": 8, **settings})
        self.machine = Machine(self.settings, term=1)
        self.now_s = 0.0
        self.sent: list[tuple[str, Any]] = []
        self.drops: list[tuple[str, int, Drop]] = []
        self.lives: dict[str, int] = {}
        self.usages: list[Usage | None] = []
        for worker in workers:
            self.join(worker)

    def handle(self, event: Event) -> list[tuple[str, Any]]:
        out: list[tuple[str, Any]] = []
        for command in self.machine.handle(event, self.now_s):
            match command:
                case events.ToWorker(worker=name, message=message):
                    out.append((name, without_odds(message)))
                case events.ToClient(client=name, message=output):
                    # Rows spell what is said; what it cost so far is kept apart.
                    self.usages.append(output.usage)
                    out.append((name, output if output.finish_reason else replace(output, usage=None)))
                case events.Suspect(worker=name):
                    out.append((name, "suspect"))
        self.sent += out
        self.drops += [(name, self.lives[name], message) for name, message in out if isinstance(message, Drop)]
        return out

    def play(self, rows: Iterable[Row]) -> None:
        for i, (event, commands) in enumerate(rows):
            assert self.handle(event) == commands, f"row {i}: {event}"

    def join(self, worker: str, incarnation: int = 1, **hello: Any) -> list[tuple[str, Any]]:
        self.lives[worker] = incarnation
        facts: dict[str, Any] = {"slots": 4, "capacity": 1000, "page_size": 4, "max_model_len": 100, "vocab_size": 50}
        role = worker.rstrip("0123456789")
        whole = Hello(worker=worker, role=role, incarnation=incarnation, fingerprint={}, **{**facts, **hello})
        return self.handle(events.WorkerJoined(whole))

    def open(self, worker: str) -> int:
        """Credits that are out."""
        return int(self.machine.snapshot()["workers"][worker]["open"])

    def free_all(self) -> None:
        """Every worker answers the Drops that it was sent."""
        drops, self.drops = self.drops, []
        for name, life, message in drops:
            self.handle(says(name, Freed(request=message.request, epoch=message.epoch), life))

    def state(self) -> Any:
        """All that the machine knows, as plain values; without times, and what it notes of one event."""
        return plain({k: v for k, v in vars(self.machine._ctx).items() if k not in ("now", "out", "notes", "heard")})


def started(policy: str, *workers: str, **settings: int) -> Bench:
    """The prompt is prefilled at home; token 8 was drawn, and its node id is 1."""
    bench = Bench("decode", *workers, **settings)
    bench.handle(submit(policy=policy))
    return bench


def without_odds(message: Any) -> Any:
    """Odds change with all that is seen; rows do not spell them."""
    return replace(message, shape=replace(message.shape, odds=())) if isinstance(message, Draft) else message


def plain(value: Any) -> Any:
    """An object as nested tuples, to compare and to keep."""
    if isinstance(value, dict):
        return tuple((plain(k), plain(v)) for k, v in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(plain(v) for v in value)
    if isinstance(value, Enum) or not (hasattr(value, "__dict__") or hasattr(value, "__slots__")):
        return value
    names: Iterable[str] = vars(value) if hasattr(value, "__dict__") else value.__slots__
    return type(value).__name__, tuple((name, plain(getattr(value, name))) for name in names)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, "temperature": 0.0, "prompt_tokens": len(PROMPT), **changes})


def submit(
    prompt: tuple[int, ...] = PROMPT,
    *,
    key: str = "a",
    policy: str | None = "ar",
    wide: int | None = None,
    emitted: tuple[int, ...] = (),
    **changes: Any,
) -> events.FromClient:
    """By client "c"."""
    choice = SpeculationChoice(policy=policy, num_speculative_tokens=wide)
    message = Submit(key=key, prompt=prompt, params=params(**changes), emitted=emitted, speculation=choice)
    return events.FromClient("c", message)


def cancel(key: str = "a") -> events.FromClient:
    return events.FromClient("c", Cancel(key=key))


def says(worker: str, message: Any, incarnation: int = 1) -> events.FromWorker:
    return events.FromWorker(worker, incarnation, message)


def verdict(worker: str, task: int, root: int | None, *nodes: tuple[int, int], request: int = 1) -> events.FromWorker:
    """The outcome of the root, if it was asked for, and those of nodes."""
    outcomes = (*(((ROOT, root),) if root is not None else ()), *nodes)
    return says(worker, Verdict(request=request, epoch=0, task=task, outcomes=outcomes))


def drafted(
    task: int, *tokens: int, base: int = 4, parents: tuple[int, ...] | None = None, worker: str = "draft"
) -> events.FromWorker:
    """A chain, where parents are not given. base 4: below PROMPT and one more token."""
    above = tuple(range(ROOT, len(tokens) - 1)) if parents is None else parents
    return says(worker, Drafted(request=1, epoch=0, task=task, base=base, tokens=tokens, parents=above))


def draft(task: int, keep: int, *tokens: int, epoch: int = 1, steps: int = 2, nodes: int = 64) -> Draft:
    """With as many levels as may still be emitted: 8 after the prefill of PROMPT, and one less for each token."""
    opening = params() if keep == 0 else None
    depth = 12 - keep - len(tokens)
    shape = Shape(steps=steps, depth=depth, nodes=nodes)
    return Draft(request=1, epoch=epoch, task=task, keep=keep, tokens=tokens, shape=shape, params=opening)


def extend(task: int, start: int, *tokens: int, epoch: int = 1, **rest: tuple[int | Node, ...]) -> Extend:
    return Extend(request=1, epoch=epoch, task=task, start=start, tokens=tokens, **rest)  # type: ignore[arg-type]


def left(worker: str, incarnation: int = 1) -> events.WorkerLeft:
    return events.WorkerLeft(worker, incarnation, "gone")


def output(start: int, *tokens: int, key: str = "a") -> tuple[str, Output]:
    return "c", Output(key=key, start=start, tokens=tokens)


def kinds(commands: list[tuple[str, Message]]) -> list[tuple[str, str]]:
    """Who got what, by type."""
    return [(name, message if isinstance(message, str) else type(message).__name__) for name, message in commands]
