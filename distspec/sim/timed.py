"""A fleet in virtual time that steps and messages take as measured: how fast policies are, by the real machine.

Knows curves, a closed load, and what to count. Every message takes one hop, and the coordinator no time. Nothing
breaks here, and nothing is random but the seed of the requests; `world` is for what goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from msgspec import structs

from distspec.coordinator import events
from distspec.coordinator.context import Settings
from distspec.coordinator.machine import Machine
from distspec.curve import Curve
from distspec.protocol.messages import Drafted, FromWorker, Hello, Output, Progress, Submit, Verdict
from distspec.protocol.values import SamplingParams, Usage
from distspec.sim.thoughts import thought
from distspec.sim.timed_workers import SyntheticModel, TimedDrafter, TimedTarget
from distspec.sim.violation import Violation

VOCAB = 32_768
PROMPT = 4
TICK_S = 1.0
_CAPACITY = 1 << 40

CLAIMED = 9
"""Widths of which a target says what they cost, each twice the one before."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """target, drafter: seconds of a step by its rows. hop_s: of a message, one way, KV transfers too."""

    target: Curve
    drafter: Curve
    hop_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """batch: requests that run at once, of max_tokens each. odds: how often the drafter's guesses are right. apart_s:
    seconds from one's arrival to the next one's."""

    batch: int
    odds: tuple[float, ...]
    max_tokens: int = 1 << 30
    seed: int = 0
    apart_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """tokens_s: output tokens per second, of all requests. token_s: seconds per token of one request.

    accepted: drafted nodes kept per round. hits: share of rounds whose last token was drafted already. target_busy,
    draft_busy: share of the workers' time. wasted: share of judged nodes that were not kept.
    """

    tokens_s: float
    token_s: float
    accepted: float
    hits: float
    target_busy: float
    draft_busy: float
    wasted: float


@dataclass(slots=True)
class _Actor:
    """A worker and its clock. busy_s: that it has computed."""

    worker: TimedTarget | TimedDrafter
    curve: Curve
    steps: bool = False
    busy_s: float = 0.0


@dataclass(slots=True)
class _Counts:
    """What was counted until a moment."""

    now_s: float = 0.0
    tokens: int = 0
    rounds: int = 0
    hits: int = 0
    accepted: int = 0
    nodes: int = 0
    target_s: float = 0.0
    draft_s: float = 0.0


@dataclass(slots=True)
class _Stream:
    tokens: list[int] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    finished: str | None = None


class TimedWorld:
    """Targets of role `decode` and one draft worker under one machine, and `batch` requests from the start on.

    claims: what targets say of their steps when they join, seconds by rows; None: nothing. on_event: hears of every
    event of the machine, and when it came, before the machine does.
    """

    def __init__(
        self,
        hardware: Hardware,
        settings: Settings,
        load: Load,
        verifiers: int = 1,
        claims: Curve | None = None,
        on_event: Callable[[events.Event, float], None] = lambda event, now_s: None,
    ) -> None:
        self._hop_s, self._load = hardware.hop_s, load
        self._claims = tuple(claims(2**i) / claims(1) for i in range(CLAIMED)) if claims else ()
        self.machine, self._on_event = Machine(settings, 1), on_event
        self.streams = {f"r{i}": _Stream() for i in range(load.batch)}
        self.now_s = 0.0
        self._order = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        model = SyntheticModel(VOCAB, load.odds)
        self._actors = {
            f"decode{i}": _Actor(TimedTarget(f"decode{i}", model), hardware.target) for i in range(verifiers)
        }
        self._actors["draft0"] = _Actor(TimedDrafter("draft0", model), hardware.drafter)
        for name in self._actors:
            self._tell(events.WorkerJoined(self._hello(name)))
        for i, key in enumerate(self.streams):
            submitted = events.FromClient("client", self._submit(i, key))
            self._later(i * load.apart_s, partial(self._tell, submitted))
        self._later(TICK_S, self._tick)

    def run(self, tokens: int | None = None) -> None:
        """Until the requests have so many output tokens each, on average (None: until they have ended)."""
        most = self._load.batch * tokens if tokens is not None else None
        while not self._is_over() and (most is None or self._tokens() < most):
            self.now_s, _, action = heappop(self._heap)
            action()

    def measure(self, tokens: int, warm: int = 16) -> Measured:
        """Of so many tokens of each request, on average, after the first `warm`."""
        self.run(warm)
        before = self._counts()
        self.run(warm + tokens)
        after = self._counts()
        took_s, new = after.now_s - before.now_s, after.tokens - before.tokens
        rounds, nodes = after.rounds - before.rounds, after.nodes - before.nodes
        accepted = after.accepted - before.accepted
        targets = sum(isinstance(actor.worker, TimedTarget) for actor in self._actors.values())
        return Measured(
            tokens_s=new / took_s,
            token_s=took_s * self._load.batch / new,
            accepted=accepted / max(1, rounds),
            hits=(after.hits - before.hits) / max(1, rounds),
            target_busy=(after.target_s - before.target_s) / took_s / targets,
            draft_busy=(after.draft_s - before.draft_s) / took_s,
            wasted=1 - min(accepted, nodes) / nodes if nodes else 0.0,
        )

    def drift(self, odds: tuple[float, ...]) -> None:
        """From now on the drafter's guesses are right so often."""
        for actor in self._actors.values():
            actor.worker.model = SyntheticModel(VOCAB, odds)

    def _is_over(self) -> bool:
        return all(stream.finished for stream in self.streams.values())

    def _tokens(self) -> int:
        return sum(len(stream.tokens) for stream in self.streams.values())

    def _counts(self) -> _Counts:
        counts = _Counts(self.now_s, self._tokens())
        for usage in (stream.usage for stream in self.streams.values()):
            counts.rounds += usage.rounds
            counts.hits += usage.hits
            counts.accepted += usage.accepted
        for actor in self._actors.values():
            if isinstance(actor.worker, TimedTarget):
                counts.target_s += actor.busy_s
                counts.nodes += actor.worker.nodes
            else:
                counts.draft_s += actor.busy_s
        return counts

    # -- joining -------------------------------------------------------------------------------

    def _hello(self, name: str) -> Hello:
        is_drafter = name.startswith("draft")
        return Hello(
            worker=name,
            role="draft" if is_drafter else "decode",
            incarnation=1,
            fingerprint={},
            slots=4 * self._load.batch,
            capacity=_CAPACITY,
            page_size=1,
            max_model_len=_CAPACITY,
            vocab_size=VOCAB,
            step_cost=() if is_drafter else self._claims,
        )

    def _submit(self, index: int, key: str) -> Submit:
        params = SamplingParams(max_tokens=self._load.max_tokens, seed=self._load.seed + index)
        return Submit(key=key, prompt=tuple(range(index % 1000, index % 1000 + PROMPT)), params=params)

    def _tick(self) -> None:
        self._tell(events.Tick())
        self._later(TICK_S, self._tick)

    # -- messages ------------------------------------------------------------------------------

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._order += 1
        heappush(self._heap, (self.now_s + delay_s, self._order, action))

    def _tell(self, event: events.Event) -> None:
        """The machine takes an event, and what it wishes is on its way."""
        commands = self._handle(event)
        if meanwhile := thought(self.machine, event):
            self._handle(meanwhile)
        for command in commands:
            match command:
                case events.ToWorker(worker=name, message=message):
                    self._later(self._hop_s, partial(self._arrive, name, message))
                case events.ToClient(message=Output() as output):
                    self._output(output)
                case events.Suspect():
                    raise Violation(f"{command.worker} suspected: {command.reason}")

    def _handle(self, event: events.Event) -> list[events.Command]:
        self._on_event(event, self.now_s)
        return self.machine.handle(event, self.now_s)

    def _output(self, output: Output) -> None:
        stream = self.streams[output.key]
        stream.tokens += output.tokens
        stream.finished = output.finish_reason
        stream.usage = output.usage or stream.usage

    def _arrive(self, name: str, message: object) -> None:
        actor = self._actors[name]
        self._answer(name, actor.worker.handle(message, self.now_s))
        self._wake(name)

    def _answer(self, name: str, replies: list[FromWorker]) -> None:
        for reply in replies:
            event = events.FromWorker(name, 1, reply)  # type: ignore[arg-type]
            self._later(self._hop_s, partial(self._tell, event))
        worker = self._actors[name].worker
        if isinstance(worker, TimedTarget):
            for peer, request, ticket in worker.packets:
                self._later(self._hop_s, partial(self._packet, peer, request, ticket))
            worker.packets.clear()

    def _packet(self, peer: str, request: int, ticket: int) -> None:
        worker = self._actors[peer].worker
        assert isinstance(worker, TimedTarget)
        self._answer(peer, worker.received(request, ticket))

    # -- steps ---------------------------------------------------------------------------------

    def _wake(self, name: str) -> None:
        """Begin a step unless one runs. What arrives at the same moment is in it."""
        if not self._actors[name].steps:
            self._later(0.0, partial(self._begin, name))

    def _begin(self, name: str) -> None:
        actor = self._actors[name]
        if actor.steps:
            return
        hold_s = actor.worker.hold_s(self.now_s)
        if hold_s > 0:
            self._later(hold_s, partial(self._begin, name))
            return
        actor.steps = True
        rows, replies = actor.worker.begin()
        if not rows:
            actor.steps = False
            self._answer(name, replies)
            return
        took_s = actor.curve(rows)
        actor.busy_s += took_s
        self._later(took_s, partial(self._end, name, rows, took_s, replies))

    def _end(self, name: str, rows: int, took_s: float, replies: list[FromWorker]) -> None:
        actor = self._actors[name]
        actor.steps = False
        actor.worker.ended(rows, took_s, replies, self.now_s)
        span, step = (self.now_s - took_s, self.now_s), (rows, took_s)
        timed = [
            structs.replace(reply, span=span, step=step) if isinstance(reply, Verdict | Progress | Drafted) else reply
            for reply in replies
        ]
        self._answer(name, timed)
        self._later(0.0, partial(self._begin, name))
