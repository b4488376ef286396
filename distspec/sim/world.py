"""A whole fleet in virtual time: the real machine, simulated workers, clients, links that delay and break.

A seed decides everything. Links are first-in, first-out, as the channel's are; across links order is random.
`run` raises Violation as soon as a rule is broken; what it returns can be compared and replayed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from distspec.coordinator import events
from distspec.coordinator.context import Settings
from distspec.coordinator.machine import Machine
from distspec.protocol.messages import (
    Cancel,
    Hello,
    Output,
    SamplingParams,
    SpeculationChoice,
    Submit,
    Verdict,
)
from distspec.sim.drafter import SimDrafter
from distspec.sim.model import ToyModel
from distspec.sim.target import Packet, SimTarget
from distspec.sim.violation import Violation

COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a schedule is made of; `random_plan` draws one. Times in virtual seconds."""

    settings: Settings
    roles: tuple[str, ...]
    requests: int
    page_size: int
    pages: int
    slots: int
    accept: float
    nonsense: float
    local_drafts: bool
    deaths: int
    freezes: int
    coordinator_deaths: int
    drains: int
    cancels: float
    transfer_loss: float
    vocab: int = 23


@dataclass(slots=True)
class Stream:
    """A client's view of one request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    choice: SpeculationChoice
    tokens: list[int] = field(default_factory=list)
    finished: str | None = None
    cancelled: bool = False


@dataclass(slots=True)
class Actor:
    """A worker process. incarnation grows with every rebirth; `cut`: the coordinator gave it up."""

    role: str
    worker: SimTarget | SimDrafter
    incarnation: int
    alive: bool = True
    frozen: bool = False
    cut: bool = False
    inbox: deque[object] = field(default_factory=deque)


class World:
    """One schedule. on_event sees every event before the machine does, with its time (for journals)."""

    def __init__(
        self,
        plan: Plan,
        seed: int,
        machine: Callable[[Settings, int], Machine] = Machine,
        on_event: Callable[[int, events.Event, float, list[events.Command]], None] | None = None,
    ) -> None:
        self.plan, self.rng = plan, Random(seed)
        self.model = ToyModel(plan.vocab)
        self.now, self.order = 0.0, 0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.links: dict[tuple[str, str], float] = {}
        self.term = 1
        self._make, self._on_event = machine, on_event
        self.machine = machine(plan.settings, self.term)
        self.up = True
        self.actors: dict[str, Actor] = {}
        self.streams: dict[str, Stream] = {}
        self.known: dict[str, int] = {}

    # -- running ------------------------------------------------------------------------------

    def run(self, limit_s: float = 2000.0) -> dict[str, Stream]:
        """Until every stream has ended and nothing is open anywhere. Raises Violation."""
        for i, role in enumerate(self.plan.roles):
            self._birth(f"{role}{i}", role)
        for i in range(self.plan.requests):
            self._later(self.rng.uniform(0, 3), lambda i=i: self._submit_new(f"r{i}"))  # type: ignore[misc]
        self._faults()
        self._later(1.0, self._tick)
        while self.heap:
            self.now, _, action = heapq.heappop(self.heap)
            if self.now > limit_s:
                raise Violation(f"not finished after {limit_s} s: {self.machine.snapshot()}")
            action()
            if self._is_over():
                break
        self._final_checks()
        return self.streams

    def _is_over(self) -> bool:
        return (
            len(self.streams) == self.plan.requests
            and all(stream.finished for stream in self.streams.values())
            and self.up
            and all(actor.alive and not actor.frozen and not actor.cut for actor in self.actors.values())
            and all(not actor.worker.open for actor in self.actors.values())
            and all(entry["open"] == 0 for entry in self.machine.snapshot()["workers"].values())
        )

    def _final_checks(self) -> None:
        if not self._is_over():
            raise Violation(f"nothing left to do, yet not over: {self.machine.snapshot()}")
        for key, stream in self.streams.items():
            plain, reason = self.model.plain(stream.prompt, stream.params)
            if stream.finished == "abort":
                if not stream.cancelled:
                    raise Violation(f"{key} aborted by nobody")
                plain, reason = plain[: len(stream.tokens)], "abort"
            if (stream.tokens, stream.finished) != (plain, reason):
                raise Violation(f"{key}: {stream.tokens} {stream.finished}, the plain target has {plain} {reason}")

    # -- time and links ------------------------------------------------------------------------

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.heap, (self.now + delay_s, self.order, action))

    def _deliver(self, source: str, to: str, action: Callable[[], None]) -> None:
        """After a random delay, behind everything sent on this link before."""
        slow = self.rng.random() < 0.1
        arrival = self.now + self.rng.uniform(0.001, 2.0 if slow else 0.1)
        arrival = max(arrival, self.links.get((source, to), 0.0) + 1e-6)
        self.links[source, to] = arrival
        self._later(arrival - self.now, action)

    def _tick(self) -> None:
        self._event(events.Tick())
        self._later(1.0, self._tick)

    # -- the coordinator -------------------------------------------------------------------------

    def _event(self, event: events.Event) -> None:
        if not self.up:
            return
        judged = self._judged(event)
        commands = self.machine.handle(event, self.now)
        self._check_recorded(judged)
        if self._on_event:
            self._on_event(self.term, event, self.now, commands)
        for command in commands:
            match command:
                case events.ToWorker(worker=name, message=message):
                    term = self.term
                    incarnation = self.known[name]
                    self._deliver(
                        COORDINATOR,
                        f"{name}/{incarnation}",
                        lambda n=name, i=incarnation, m=message, t=term: self._arrive(n, i, m, t),  # type: ignore[misc]
                    )
                case events.ToClient(client=client, message=output):
                    term = self.term
                    self._deliver(COORDINATOR, client, lambda o=output, t=term: self._output(o, t))  # type: ignore[misc]
                case events.Suspect(worker=name, reason=reason):
                    self._suspected(name, reason)

    def _judged(self, event: events.Event) -> tuple[int, list[int]]:
        """The request and its live nodes that this event carries a verdict of, from a worker that holds it."""
        if not isinstance(event, events.FromWorker) or not isinstance(event.message, Verdict):
            return 0, []
        request = self.machine.request(event.message.request)
        if request is None or event.worker not in request.holds or self.known[event.worker] != event.incarnation:
            return 0, []
        return request.number, [node for node, _ in event.message.outcomes if node in request.tree]

    def _check_recorded(self, judged: tuple[int, list[int]]) -> None:
        """A verdict of a node that is still alive is never lost."""
        request = self.machine.request(judged[0])
        for node in judged[1]:
            if request is not None and node in request.tree and request.tree.nodes[node].outcome is None:
                raise Violation(f"the verdict of live node {node} of request {request.number} was lost")

    def _suspected(self, name: str, reason: str) -> None:
        actor = self.actors[name]
        if actor.alive and not actor.frozen:
            raise Violation(f"{name} suspected without a fault: {reason}")

    def _kill_coordinator(self) -> None:
        """It dies with all it knew; its successor finds workers and clients by their joining again."""
        if not self.up:
            self._later(1.0, self._kill_coordinator)
            return
        self.up = False
        self._later(self.rng.uniform(0.1, 3.0), self._revive_coordinator)

    def _revive_coordinator(self) -> None:
        self.term += 1
        self.machine, self.up = self._make(self.plan.settings, self.term), True
        for name in list(self.actors):
            self._later(self.rng.uniform(0.01, 1.0), lambda n=name, t=self.term: self._rejoin(n, t))  # type: ignore[misc]
        for key, stream in self.streams.items():
            if not stream.finished:
                self._later(self.rng.uniform(0.01, 1.0), lambda k=key, t=self.term: self._resubmit(k, t))  # type: ignore[misc]

    def _resubmit(self, key: str, term: int) -> None:
        if term == self.term and not self.streams[key].finished:
            self._submit(key)

    def _rejoin(self, name: str, term: int) -> None:
        actor = self.actors[name]
        if term != self.term or not actor.alive or actor.frozen:
            return
        self._birth(name, actor.role)

    # -- workers -----------------------------------------------------------------------------------

    def _birth(self, name: str, role: str) -> None:
        """A process joins, the first time, again after a death, or reset by a new coordinator."""
        plan, incarnation = self.plan, self.actors[name].incarnation + 1 if name in self.actors else 1
        rng = Random(self.rng.random())
        worker: SimTarget | SimDrafter
        drafts = role == "draft" or (plan.local_drafts and role == "decode")
        drafter = SimDrafter(name, self.model, rng, slots=plan.slots, accept=plan.accept, nonsense=plan.nonsense)
        if role == "draft":
            worker = drafter
        else:
            worker = SimTarget(
                name,
                self.model,
                rng,
                drafter if drafts else None,
                pages=plan.pages,
                page_size=plan.page_size,
                slots=plan.slots,
                room=plan.settings.room,
            )
        self.actors[name] = Actor(role, worker, incarnation)
        hello = Hello(
            worker=name,
            role=role,
            incarnation=incarnation,
            fingerprint={},
            slots=plan.slots,
            capacity=plan.pages * plan.page_size,
            page_size=plan.page_size,
            max_model_len=10_000,
            vocab_size=plan.vocab,
            step_cost=(1.0, 1.1, 1.3, 1.7, 2.5),
            drafts=drafts,
        )
        self._deliver(f"{name}/{incarnation}", COORDINATOR, lambda t=self.term: self._joined(hello, t))  # type: ignore[misc]

    def _joined(self, hello: Hello, term: int) -> None:
        actor = self.actors[hello.worker]
        if term == self.term and actor.alive and actor.incarnation == hello.incarnation:
            self.known[hello.worker] = hello.incarnation
            self._event(events.WorkerJoined(hello))

    def _arrive(self, name: str, incarnation: int, message: object, term: int) -> None:
        """A message reaches a worker and is handled in its turn, unless it is stale."""
        actor = self.actors[name]
        if actor.incarnation != incarnation or not actor.alive or term != self.term:
            return
        actor.inbox.append(message)
        if len(actor.inbox) == 1:
            self._schedule(name, actor)

    def _schedule(self, name: str, actor: Actor) -> None:
        self._later(self.rng.uniform(0.005, 0.2), lambda: self._work(name, actor))

    def _work(self, name: str, actor: Actor) -> None:
        """Handle the oldest message. A frozen process does nothing until it thaws; a dead one never again."""
        if self.actors[name] is not actor or not actor.alive or actor.frozen or not actor.inbox:
            return
        leased = set(actor.worker.leased()) if isinstance(actor.worker, SimTarget) else set()
        self._answer(name, actor, actor.worker.handle(actor.inbox.popleft()))
        if isinstance(actor.worker, SimTarget):
            for number in set(actor.worker.leased()) - leased:
                self._later(
                    self.rng.uniform(0.01, 0.2),
                    lambda n=number: self._round(name, actor.incarnation, n),  # type: ignore[misc]
                )
        if actor.inbox:
            self._schedule(name, actor)

    def _round(self, name: str, incarnation: int, number: int) -> None:
        actor = self.actors[name]
        if actor.incarnation != incarnation or not actor.alive or not isinstance(actor.worker, SimTarget):
            return
        if not actor.frozen:
            self._answer(name, actor, actor.worker.round(number))
        if number in actor.worker.leased():
            self._later(self.rng.uniform(0.01, 0.2), lambda: self._round(name, incarnation, number))

    def _answer(self, name: str, actor: Actor, replies: list[object] | list) -> None:  # type: ignore[type-arg]
        worker, incarnation, term = actor.worker, actor.incarnation, self.term
        worker.check()
        for reply in replies:
            self._deliver(
                f"{name}/{incarnation}",
                COORDINATOR,
                lambda r=reply: self._reply(name, incarnation, r, term),  # type: ignore[misc]
            )
        if isinstance(worker, SimTarget):
            for peer, packet in worker.packets:
                if self.rng.random() >= self.plan.transfer_loss:
                    target = self.actors[peer].incarnation
                    self._deliver(
                        f"{name}/{incarnation}",
                        f"{peer}/{target}",
                        lambda p=peer, i=target, k=packet: self._arrive(p, i, k, term),  # type: ignore[misc]
                    )
                else:
                    self._lose_transfer(name, peer, packet)
            worker.packets = []

    def _lose_transfer(self, source: str, peer: str, packet: Packet) -> None:
        """A link breaks: one side notices, at random which."""
        incarnations = {side: self.actors[side].incarnation for side in (source, peer)}

        def notice(side: str) -> None:
            actor = self.actors[side]
            if actor.incarnation != incarnations[side] or not actor.alive or not isinstance(actor.worker, SimTarget):
                return
            replies = actor.worker.lose(packet, side == source)
            self._answer(side, actor, replies)
            if not replies:
                notice(source)

        side = self.rng.choice((source, peer))
        self._later(self.rng.uniform(0.1, 1.0), lambda: notice(side))

    def _reply(self, name: str, incarnation: int, reply: object, term: int) -> None:
        if term == self.term:
            self._event(events.FromWorker(name, incarnation, reply))  # type: ignore[arg-type]

    # -- faults ----------------------------------------------------------------------------------

    def _faults(self) -> None:
        for _ in range(self.plan.deaths):
            self._later(self.rng.uniform(0.2, 8), self._kill_somebody)
        for _ in range(self.plan.freezes):
            self._later(self.rng.uniform(0.2, 8), self._freeze_somebody)
        for _ in range(self.plan.drains):
            self._later(self.rng.uniform(0.2, 6), self._drain_somebody)
        for _ in range(self.plan.coordinator_deaths):
            self._later(self.rng.uniform(0.5, 8), self._kill_coordinator)

    def _kill_somebody(self) -> None:
        name = self.rng.choice(list(self.actors))
        actor = self.actors[name]
        actor.alive = False
        self._give_up(name, actor.incarnation)
        self._later(self.rng.uniform(2.5, 6.0), lambda: self._birth(name, actor.role))

    def _freeze_somebody(self) -> None:
        """A stopped process: silent, then given up, then awake again and full of stale work."""
        name = self.rng.choice(list(self.actors))
        actor = self.actors[name]
        actor.frozen = True
        self._give_up(name, actor.incarnation)
        self._later(self.rng.uniform(1.0, 4.0), lambda: self._thaw(name, actor.incarnation))

    def _drain_somebody(self) -> None:
        """A worker is scaled down: it hands its work over, leaves, and one of its name joins later."""
        name = self.rng.choice(list(self.actors))
        actor = self.actors[name]
        self._event(events.Drain(name))

        def leave() -> None:
            if self.actors[name] is actor and actor.alive and not actor.frozen:
                self._birth(name, actor.role)

        self._later(self.rng.uniform(1.0, 4.0), leave)

    def _give_up(self, name: str, incarnation: int) -> None:
        def left() -> None:
            self.actors[name].cut = self.actors[name].incarnation == incarnation
            self._event(events.WorkerLeft(name, incarnation, "no heartbeat"))

        self._later(self.rng.uniform(0.5, 2.0), left)

    def _thaw(self, name: str, incarnation: int) -> None:
        actor = self.actors[name]
        if actor.incarnation != incarnation:
            return
        actor.frozen = False
        self._schedule(name, actor)
        self._later(self.rng.uniform(1.5, 2.5), lambda: self._learn_of_cut(name, incarnation))

    def _learn_of_cut(self, name: str, incarnation: int) -> None:
        """It hears that it was given up, forgets everything, and joins as a new incarnation."""
        actor = self.actors[name]
        if actor.incarnation == incarnation and actor.alive:
            self._birth(name, actor.role)

    # -- clients -----------------------------------------------------------------------------------

    def _submit_new(self, key: str) -> None:
        shared = [self.rng.randrange(self.plan.vocab) for _ in range(self.rng.randrange(1, 12))]
        if self.streams and self.rng.random() < 0.5:
            shared = list(self.rng.choice(list(self.streams.values())).prompt) + shared[:3]
        params = SamplingParams(
            max_tokens=self.rng.randrange(1, 14), seed=self.rng.randrange(4), stop_token_ids=(self.rng.randrange(23),)
        )
        policy = self.rng.choice(("ar", "sd", "dsi"))
        wide = self.rng.choice((None, 1, 2, 4))
        self.streams[key] = Stream(tuple(shared), params, SpeculationChoice(policy=policy, num_speculative_tokens=wide))
        self._submit(key)
        if self.rng.random() < self.plan.cancels:
            self._later(self.rng.uniform(0.1, 4.0), lambda: self._cancel(key))

    def _submit(self, key: str) -> None:
        stream, term = self.streams[key], self.term
        message = Submit(
            key=key,
            prompt=stream.prompt,
            params=stream.params,
            emitted=tuple(stream.tokens),
            speculation=stream.choice,
        )
        self._deliver(key, COORDINATOR, lambda: self._from_client(key, message, term))

    def _cancel(self, key: str) -> None:
        self.streams[key].cancelled = True
        term = self.term
        self._deliver(key, COORDINATOR, lambda: self._from_client(key, Cancel(key=key), term))

    def _from_client(self, key: str, message: Submit | Cancel, term: int) -> None:
        if term == self.term:
            self._event(events.FromClient(key, message))

    def _output(self, output: Output, term: int) -> None:
        stream = self.streams[output.key]
        if term != self.term:
            return
        if stream.finished:
            raise Violation(f"{output.key}: a message after the terminal one: {output}")
        if output.start != len(stream.tokens):
            raise Violation(f"{output.key}: output at {output.start}, has {len(stream.tokens)}")
        stream.tokens += output.tokens
        stream.finished = output.finish_reason


def random_plan(seed: int) -> Plan:
    """A small fleet and its troubles, drawn from a seed."""
    rng = Random(seed)
    roles = ["decode"] * rng.randint(1, 2) + ["verify"] * rng.randint(0, 2)
    roles += ["prefill"] * rng.randint(0, 1) + ["draft"] * rng.randint(0, 2)
    local = rng.random() < 0.3
    page_size = rng.choice((1, 2, 4, 16))
    room = rng.choice((8, 16))
    longest = 16 * 3 + 14
    tight = rng.random() < 0.5
    positions = longest + room + 2 * page_size + (rng.randint(0, 40) if tight else 300)
    return Plan(
        settings=Settings(
            policy="sd",
            local_drafts=local,
            width=rng.choice((None, 1, 2, 4)),
            lookahead=rng.choice((1, 2, 3)),
            room=room,
        ),
        roles=tuple(roles),
        requests=rng.randint(1, 6),
        page_size=page_size,
        pages=-(-positions // page_size) + 2,
        slots=rng.randint(1, 3),
        accept=rng.choice((0.0, 0.5, 0.9, 1.0)),
        nonsense=rng.choice((0.0, 0.0, 0.3)),
        local_drafts=local,
        deaths=rng.choice((0, 0, 1, 2)),
        freezes=rng.choice((0, 0, 1)),
        coordinator_deaths=rng.choice((0, 0, 0, 1)),
        drains=rng.choice((0, 0, 1, 2)),
        cancels=rng.choice((0.0, 0.3)),
        transfer_loss=rng.choice((0.0, 0.0, 0.3)),
    )
