"""The worker processes of a simulated fleet: births, deaths, freezes, what they read and when they work.

Knows workers and their links. Does not know the coordinator, but for the events that it is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from distspec.coordinator import events
from distspec.protocol.messages import FromWorker, Hello
from distspec.sim.drafter import SimDrafter
from distspec.sim.model import ToyModel
from distspec.sim.network import Network
from distspec.sim.packet import Packet
from distspec.sim.plan import Plan
from distspec.sim.target import SimTarget

COORDINATOR = "coordinator"


@dataclass(slots=True)
class Actor:
    """A worker process. incarnation grows with every rebirth; `cut`: the coordinator gave it up; `awake`: its
    next step is under way."""

    name: str
    role: str
    worker: SimTarget | SimDrafter
    incarnation: int
    alive: bool = True
    frozen: bool = False
    cut: bool = False
    awake: bool = False
    inbox: deque[object] = field(default_factory=deque)

    @property
    def address(self) -> str:
        return f"{self.name}/{self.incarnation}"

    @property
    def runs(self) -> bool:
        return self.alive and not self.frozen


class Crew:
    """tell: takes what the coordinator hears. known: the incarnation of each worker that has joined it."""

    def __init__(self, plan: Plan, network: Network, model: ToyModel, tell: Callable[[events.Event], None]) -> None:
        self._plan, self._network, self._model, self._tell = plan, network, model, tell
        self.actors: dict[str, Actor] = {}
        self.known: dict[str, int] = {}

    def is_idle(self) -> bool:
        """Everybody is well, and holds nothing."""
        return all(actor.runs and not actor.cut and not actor.worker.open for actor in self.actors.values())

    # -- lives ---------------------------------------------------------------------------------

    def birth(self, name: str, role: str) -> None:
        """A process joins, the first time, again after a death, or reset by a new coordinator."""
        plan, old = self._plan, self.actors.get(name)
        rng = Random(self._network.rng.random())
        drafts = role == "draft" or (plan.local_drafts and role == "decode")
        drafter = SimDrafter(
            name,
            self._model,
            rng,
            slots=plan.slots,
            accept=plan.accept,
            nonsense=plan.nonsense,
            reads=plan.settings.features and role == "draft",
        )
        worker = drafter if role == "draft" else self._target(name, rng, drafter if drafts else None)
        actor = self.actors[name] = Actor(name, role, worker, old.incarnation + 1 if old else 1)
        hello = Hello(
            worker=name,
            role=role,
            incarnation=actor.incarnation,
            fingerprint={},
            slots=plan.slots,
            capacity=plan.pages * plan.page_size,
            page_size=plan.page_size,
            max_model_len=plan.max_model_len,
            vocab_size=plan.vocab,
            step_cost=(1.0, 1.1, 1.3, 1.7, 2.5),
            drafts=drafts,
        )
        self._network.deliver(actor.address, COORDINATOR, lambda: self._joined(actor, hello))

    def rebirth(self, actor: Actor) -> None:
        """If it still is the one of its name, and runs."""
        if self.actors[actor.name] is actor and actor.runs:
            self.birth(actor.name, actor.role)

    def kill(self, actor: Actor) -> None:
        actor.alive = False
        self._give_up(actor)
        self._network.soon(2.5, 6.0, lambda: self.birth(actor.name, actor.role))

    def freeze(self, actor: Actor) -> None:
        """A stopped process: silent, then given up, then awake again and full of stale work."""
        actor.frozen = True
        self._give_up(actor)
        self._network.soon(1.0, 4.0, lambda: self._thaw(actor))

    def drain(self, actor: Actor) -> None:
        """A worker is scaled down: it hands its work over, leaves, and one of its name joins later."""
        self._tell(events.Drain(actor.name))
        self._network.soon(1.0, 4.0, lambda: self.rebirth(actor))

    def _target(self, name: str, rng: Random, drafter: SimDrafter | None) -> SimTarget:
        plan = self._plan
        return SimTarget(
            name,
            self._model,
            rng,
            drafter,
            pages=plan.pages,
            page_size=plan.page_size,
            slots=plan.slots,
            room=plan.settings.room,
            max_model_len=plan.max_model_len,
            reads=plan.settings.features,
        )

    def _joined(self, actor: Actor, hello: Hello) -> None:
        if actor.alive and self.actors[actor.name] is actor:
            self.known[actor.name] = actor.incarnation
            self._tell(events.WorkerJoined(hello))

    def _give_up(self, actor: Actor) -> None:
        def left() -> None:
            actor.cut = True
            self._tell(events.WorkerLeft(actor.name, actor.incarnation, "no heartbeat"))

        self._network.soon(0.5, 2.0, left)

    def _thaw(self, actor: Actor) -> None:
        """It goes on where it was; then it hears that it was given up, forgets everything, and joins again."""
        if self.actors[actor.name] is actor:
            actor.frozen = False
            self._read(actor)
            self._network.soon(1.5, 2.5, lambda: self.rebirth(actor))

    # -- work ----------------------------------------------------------------------------------

    def send(self, source: str, to: str, message: object) -> None:
        """To whoever has this name in the coordinator's books."""
        incarnation = self.known[to]
        self._network.deliver(source, f"{to}/{incarnation}", lambda: self._arrive(to, incarnation, message))

    def _arrive(self, name: str, incarnation: int, message: object) -> None:
        actor = self.actors[name]
        if actor.incarnation == incarnation:
            actor.inbox.append(message)
            self._read(actor)

    def _read(self, actor: Actor) -> None:
        """Messages are read as they come; a frozen process reads when it thaws, a dead one never again."""
        while actor.inbox and actor.runs:
            self._answer(actor, actor.worker.handle(actor.inbox.popleft()))
        self._wake(actor)

    def _wake(self, actor: Actor) -> None:
        if actor.runs and not actor.awake and actor.worker.ready():
            actor.awake = True
            self._network.soon(0.005, 0.2, lambda: self._step(actor))

    def _step(self, actor: Actor) -> None:
        actor.awake = False
        if self.actors[actor.name] is actor and actor.runs and actor.worker.ready():
            self._answer(actor, actor.worker.step())
            self._wake(actor)

    def _answer(self, actor: Actor, replies: Sequence[FromWorker]) -> None:
        actor.worker.check()
        for reply in replies:
            event = events.FromWorker(actor.name, actor.incarnation, reply)  # type: ignore[arg-type]
            self._network.deliver(actor.address, COORDINATOR, lambda e=event: self._tell(e))  # type: ignore[misc]
        if isinstance(actor.worker, SimTarget):
            packets, actor.worker.packets = actor.worker.packets, []
            for peer, packet in packets:
                self._transfer(actor, self.actors[peer], packet)

    # -- transfers -----------------------------------------------------------------------------

    def _transfer(self, source: Actor, peer: Actor, packet: Packet) -> None:
        if self._network.rng.random() >= self._plan.transfer_loss:
            self._network.deliver(
                source.address, peer.address, lambda: self._arrive(peer.name, peer.incarnation, packet)
            )
        else:  # a link breaks: one side notices, at random which
            side = self._network.rng.choice((source, peer))
            self._network.soon(0.1, 1.0, lambda: self._notice(side, source, packet))

    def _notice(self, side: Actor, source: Actor, packet: Packet) -> None:
        if self.actors[side.name] is not side or not side.alive:
            return
        replies = side.worker.lose(packet, side is source)
        self._answer(side, replies)
        if not replies:
            self._notice(source, source, packet)
