"""A whole fleet in one process: the coordinator's machine and the work of every worker as they are, over real
engines and drafters; only what lies between them (links, threads, time, KV transport) is in memory.

A seed decides every order: which link delivers next, which worker computes, how far it lets its messages pile
up before, when a ticket carries its next run. Links are first-in, first-out, as the channel's are.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec

from distspec.coordinator import events
from distspec.coordinator.context import Settings
from distspec.coordinator.machine import Machine
from distspec.errors import IllegalTransition
from distspec.protocol.codec import unpack_logprobs
from distspec.protocol.messages import Cancel, Fault, Hello, Message, Output, Refused, Submit
from distspec.protocol.values import SamplingParams, SpeculationChoice, TokenLogprobs, Usage
from distspec.transfer.base import End
from distspec.workers.compute import Later, Work
from tests.wire import Port, Wire

TURN_S = 0.01

PIECES = 100
"""Of what the coordinator works out meanwhile, after each message of a worker: requests here are short."""

Build = Callable[[str, Port, Callable[[Later], None]], tuple[Work, Hello]]
"""The work of a new worker, and what it says of itself: of a role, with a transport and a way to run actions later."""


@dataclass
class Stream:
    """A client's view of one request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    choice: SpeculationChoice
    tokens: list[int] = field(default_factory=list)
    finished: str | None = None
    usage: Usage | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass
class Site:
    """One life of a worker. incoming: messages on the link to it; inbox: those that arrived, and actions."""

    name: str
    role: str
    incarnation: int
    work: Work
    hello: Hello
    incoming: deque[Message] = field(default_factory=deque)
    inbox: deque[Message | Later] = field(default_factory=deque)
    replies: deque[events.Event] = field(default_factory=deque)


class Fleet:
    """seen: (role, kind of message) of everything that workers answered. loss: of KV links, see Wire."""

    def __init__(self, roles: Sequence[str], settings: Settings, build: Build, *, seed: int, loss: float = 0.0) -> None:
        self.random = Random(seed)
        self.machine = Machine(settings, term=1)
        self.streams: dict[str, Stream] = {}
        self.sites: dict[str, Site] = {}
        self.seen: Counter[tuple[str, str]] = Counter()
        self.wire = Wire(self.random, loss)
        self.turns = 0
        self._settings, self._build = settings, build
        self._events: deque[events.Event] = deque()
        self._outputs: deque[Output] = deque()
        self._lives: Counter[str] = Counter()
        self._joined: dict[str, int] = {}
        for i, role in enumerate(roles):
            self.start(f"{role}:{i}", role)

    # -- what a test does ------------------------------------------------------------------------

    def submit(self, key: str, prompt: Sequence[int], params: SamplingParams, policy: str | None = None) -> None:
        stream = Stream(tuple(prompt), params, SpeculationChoice(policy=policy))
        self.streams[key] = stream
        self._ask(key)

    def cancel(self, key: str) -> None:
        """A client goes away."""
        self._events.append(events.FromClient("client", Cancel(key=key)))

    def run(self, until: Callable[[], bool] | None = None, turns: int = 20_000) -> None:
        """Until that holds; else until every stream has ended and nothing is open anywhere."""
        until = until or self._is_over
        while not until():
            assert self.turns < turns, f"no end: {self.machine.snapshot()}"
            self._turn()
        if until == self._is_over:
            self._check_rest()

    def start(self, name: str, role: str) -> None:
        """A worker joins, or joins again after a death."""
        self._lives[name] += 1
        incarnation = self._lives[name]
        inbox: deque[Message | Later] = deque()
        work, hello = self._build(role, Port(self.wire, End(name, incarnation)), inbox.append)
        self.sites[name] = Site(name, role, incarnation, work, _named(hello, name, role, incarnation), inbox=inbox)
        self._events.append(events.WorkerJoined(self.sites[name].hello))

    def kill(self, name: str) -> None:
        """A process dies: some of what it said may still arrive, then the coordinator hears of it."""
        site = self.sites.pop(name)
        del self.wire.ports[End(name, site.incarnation)]
        heard = self.random.randint(0, len(site.replies))
        self._events.extend(list(site.replies)[:heard])
        self._events.append(events.WorkerLeft(name, site.incarnation, "killed"))

    def restart_coordinator(self) -> None:
        """It dies with all it knew; its successor is joined by workers that have forgotten, clients resubmit."""
        self.machine = Machine(self._settings, self.machine.snapshot()["term"] + 1)
        self._events.clear()
        self._outputs.clear()
        for site in self.sites.values():
            self._lives[site.name] += 1
            site.incarnation = self._lives[site.name]
            for link in (site.incoming, site.inbox, site.replies):
                link.clear()
            site.work.reset(site.incarnation)
            site.hello = _named(site.hello, site.name, site.role, site.incarnation)
            self._events.append(events.WorkerJoined(site.hello))
        for key, stream in self.streams.items():
            if stream.finished is None:
                self._ask(key)

    # -- one turn ----------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Somebody does something."""
        self.turns += 1
        if self.turns % 100 == 0:
            self._handle(events.Tick())
        choices: list[Callable[[], None]] = []
        if self._events:
            choices.append(lambda: self._handle(self._events.popleft()))
        if self._outputs:
            choices.append(lambda: self._output(self._outputs.popleft()))
        for site in self.sites.values():
            if site.incoming:
                choices.append(lambda s=site: s.inbox.append(s.incoming.popleft()))  # type: ignore[misc]
            if site.replies:
                choices.append(lambda s=site: self._handle(s.replies.popleft()))  # type: ignore[misc]
            if site.inbox or site.work.ready():
                choices.append(lambda s=site: self._compute(s))  # type: ignore[misc]
        for port, ticket in self.wire.movable():
            choices.append(lambda p=port, t=ticket: self.wire.move(p, t))  # type: ignore[misc]
        if choices:
            self.random.choice(choices)()

    def _compute(self, site: Site) -> None:
        """Some messages, then a step, as the compute thread does it; then its pages must balance."""
        replies: list[Message] = []
        for _ in range(self.random.randint(0, len(site.inbox))):
            item = site.inbox.popleft()
            replies += item() if callable(item) else site.work.receive(item)
        if site.work.ready() and self.random.random() < 0.8:
            replies += site.work.step()
        for reply in replies:
            assert not isinstance(reply, Fault), reply
            assert not (isinstance(reply, Refused) and reply.reason == "state"), reply
            self.seen[site.role, type(reply).__name__] += 1
            site.replies.append(events.FromWorker(site.name, site.incarnation, reply))  # type: ignore[arg-type]
        if self.random.random() < 0.3:
            site.work.check()

    def _handle(self, event: events.Event) -> None:
        if isinstance(event, events.WorkerJoined):
            self._joined[event.hello.worker] = event.hello.incarnation
        for command in self.machine.handle(event, self.turns * TURN_S):
            match command:
                case events.ToWorker(worker=name, message=message):
                    site = self.sites.get(name)
                    if site is not None and site.incarnation == self._joined[name]:  # links are made to lives
                        site.incoming.append(message)
                case events.ToClient(message=output):
                    self._outputs.append(output)
                case events.Suspect(worker=name, reason=reason):
                    raise AssertionError(f"{name} is suspected: {reason}")
        if isinstance(event, events.FromWorker):
            self.machine.handle(events.Thought(PIECES), self.turns * TURN_S)

    def _ask(self, key: str) -> None:
        stream = self.streams[key]
        message = Submit(
            key=key,
            prompt=stream.prompt,
            params=stream.params,
            emitted=tuple(stream.tokens),
            speculation=stream.choice,
        )
        self._events.append(events.FromClient("client", message))

    def _output(self, output: Output) -> None:
        stream = self.streams[output.key]
        if stream.finished is not None or output.start != len(stream.tokens):
            raise IllegalTransition(f"{output} after {len(stream.tokens)} tokens, {stream.finished}")
        assert output.error is None, output
        stream.tokens += output.tokens
        stream.finished, stream.usage = output.finish_reason, output.usage
        stream.logprobs += output.logprobs
        stream.prompt_logprobs += unpack_logprobs(output.prompt_logprobs)

    # -- the end -----------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        return all(stream.finished for stream in self.streams.values()) and not any(
            (
                self._events,
                self._outputs,
                any(site.incoming or site.inbox or site.replies or site.work.ready() for site in self.sites.values()),
                any(port.tickets for port in self.wire.ports.values()),
            )
        )

    def _check_rest(self) -> None:
        """Nothing is owed: all credits are back, and the books of every worker balance."""
        snapshot = self.machine.snapshot()
        assert not snapshot["requests"]
        assert {name: worker["open"] for name, worker in snapshot["workers"].items()} == dict.fromkeys(self.sites, 0)
        for site in self.sites.values():
            site.work.check()


def _named(hello: Hello, name: str, role: str, incarnation: int) -> Hello:
    return msgspec.structs.replace(hello, worker=name, role=role, incarnation=incarnation)
