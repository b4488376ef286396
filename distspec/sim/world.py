"""A whole fleet in virtual time: the real machine, simulated workers, clients, links that delay and break.

A seed decides everything. `run` raises Violation as soon as a rule is broken; what it returns can be compared
and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import msgspec

from distspec.coordinator import events
from distspec.coordinator.context import Settings
from distspec.coordinator.machine import Machine
from distspec.protocol.codec import unpack_logprobs
from distspec.protocol.messages import Cancel, Output, Submit, Verdict
from distspec.protocol.values import SamplingParams, SpeculationChoice, TokenLogprobs
from distspec.sim.crew import COORDINATOR, Actor, Crew
from distspec.sim.model import ToyModel
from distspec.sim.network import Network
from distspec.sim.plan import LONGEST_PROMPT, MOST_TOKENS, Plan
from distspec.sim.thoughts import thought
from distspec.sim.violation import Violation


@dataclass(slots=True)
class Stream:
    """A client's view of one request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    choice: SpeculationChoice
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: str | None = None
    cancelled: bool = False


class World:
    """One schedule. on_event sees every event that the machine handled, with its term and time (for journals)."""

    def __init__(
        self,
        plan: Plan,
        seed: int,
        machine: Callable[[Settings, int], Machine] = Machine,
        on_event: Callable[[int, events.Event, float, list[events.Command]], None] | None = None,
    ) -> None:
        self.plan, self.rng = plan, Random(seed)
        self.network = Network(self.rng)
        self.model = ToyModel(plan.vocab)
        self.crew = Crew(plan, self.network, self.model, self._event)
        self.streams: dict[str, Stream] = {}
        self._make, self._on_event = machine, on_event
        self.machine = machine(plan.settings, self.term)
        self.up = True

    @property
    def term(self) -> int:
        return self.network.term

    # -- running -------------------------------------------------------------------------------

    def run(self, limit_s: float = 2000.0) -> dict[str, Stream]:
        """Until every stream has ended and nothing is open anywhere. Raises Violation."""
        for i, role in enumerate(self.plan.roles):
            self.crew.birth(f"{role}{i}", role)
        for i in range(self.plan.requests):
            self.network.soon(0, 3, lambda i=i: self._submit_new(f"r{i}"))  # type: ignore[misc]
        self._faults()
        self.network.later(1.0, self._tick)
        while not self._is_over() and self.network.turn():
            if self.network.now_s > limit_s:
                raise Violation(f"not finished after {limit_s} s: {self.machine.snapshot()}")
        self._final_checks()
        return self.streams

    def _is_over(self) -> bool:
        return (
            self.up
            and len(self.streams) == self.plan.requests
            and all(stream.finished for stream in self.streams.values())
            and self.crew.is_idle()
            and all(entry["open"] == 0 for entry in self.machine.snapshot()["workers"].values())
        )

    def _final_checks(self) -> None:
        if not self._is_over():
            raise Violation(f"nothing left to do, yet not over: {self.machine.snapshot()}")
        for key, stream in self.streams.items():
            most = min(stream.params.max_tokens, self.plan.max_model_len - len(stream.prompt))
            plain, reason = self.model.plain(stream.prompt, msgspec.structs.replace(stream.params, max_tokens=most))
            if stream.finished == "abort":
                if not stream.cancelled:
                    raise Violation(f"{key} aborted by nobody")
                plain, reason = plain[: len(stream.tokens)], "abort"
            if (stream.tokens, stream.finished) != (plain, reason):
                raise Violation(f"{key}: {stream.tokens} {stream.finished}, the plain target has {plain} {reason}")
            self._check_logprobs(key, stream)

    def _check_logprobs(self, key: str, stream: Stream) -> None:
        """Those of every token came once, where they were asked for, and are those of its own path."""
        text, params, first = [*stream.prompt, *stream.tokens], stream.params, len(stream.prompt)
        prompt = range(1, first if stream.tokens and params.prompt_logprobs is not None else 1)
        output = range(first, len(text) if params.logprobs is not None else first)
        for found, ends in ((stream.prompt_logprobs, prompt), (stream.logprobs, output)):
            if found != [self.model.logprobs(text[:end], params) for end in ends]:
                raise Violation(f"{key}: logprobs {found} of {ends} in {text}")

    def _tick(self) -> None:
        self._event(events.Tick())
        self.network.later(1.0, self._tick)

    # -- the coordinator -----------------------------------------------------------------------

    def _event(self, event: events.Event) -> None:
        if not self.up:
            return
        judged = self._judged(event)
        commands = self.machine.handle(event, self.network.now_s)
        self._check_recorded(judged)
        if self._on_event:
            self._on_event(self.term, event, self.network.now_s, commands)
        for command in commands:
            match command:
                case events.ToWorker(worker=name, message=message):
                    self.crew.send(COORDINATOR, name, message)
                case events.ToClient(client=client, message=output):
                    self.network.deliver(COORDINATOR, client, lambda o=output: self._output(o))  # type: ignore[misc]
                case events.Suspect(worker=name, reason=reason):
                    self._suspected(name, reason)
        if meanwhile := thought(self.machine, event):
            self._event(meanwhile)

    def _judged(self, event: events.Event) -> tuple[int, list[int]]:
        """The request and its live nodes that this event carries a verdict of, from a worker that holds it."""
        if not isinstance(event, events.FromWorker) or not isinstance(event.message, Verdict):
            return 0, []
        request = self.machine.request(event.message.request)
        is_known = self.crew.known[event.worker] == event.incarnation
        if request is None or event.worker not in request.holds or not is_known:
            return 0, []
        return request.number, [node for node, _ in event.message.outcomes if node in request.tree]

    def _check_recorded(self, judged: tuple[int, list[int]]) -> None:
        """A verdict of a node that is still alive is never lost."""
        request = self.machine.request(judged[0])
        for node in judged[1]:
            if request is not None and node in request.tree and request.tree[node].outcome is None:
                raise Violation(f"the verdict of live node {node} of request {request.number} was lost")

    def _suspected(self, name: str, reason: str) -> None:
        if self.crew.actors[name].runs:
            raise Violation(f"{name} suspected without a fault: {reason}")

    # -- troubles ------------------------------------------------------------------------------

    def _faults(self) -> None:
        plan, soon = self.plan, self.network.soon
        for _ in range(plan.deaths):
            soon(0.2, 8, lambda: self.crew.kill(self._somebody()))
        for _ in range(plan.freezes):
            soon(0.2, 8, lambda: self.crew.freeze(self._somebody()))
        for _ in range(plan.drains):
            soon(0.2, 6, lambda: self.crew.drain(self._somebody()))
        for _ in range(plan.coordinator_deaths):
            soon(0.5, 8, self._kill_coordinator)

    def _somebody(self) -> Actor:
        return self.rng.choice(list(self.crew.actors.values()))

    def _kill_coordinator(self) -> None:
        """It dies with all it knew; its successor finds workers and clients by their joining again."""
        if not self.up:
            self.network.later(1.0, self._kill_coordinator)
            return
        self.up = False
        self.network.soon(0.1, 3.0, self._revive_coordinator)

    def _revive_coordinator(self) -> None:
        self.network.term += 1
        self.machine, self.up = self._make(self.plan.settings, self.term), True
        for actor in list(self.crew.actors.values()):
            self._rejoin(lambda a=actor: self.crew.rebirth(a))  # type: ignore[misc]
        for key in self.streams:
            self._rejoin(lambda k=key: self._submit(k))  # type: ignore[misc]

    def _rejoin(self, action: Callable[[], None]) -> None:
        term = self.term
        self.network.soon(0.01, 1.0, lambda: action() if term == self.term else None)

    # -- clients -------------------------------------------------------------------------------

    def _submit_new(self, key: str) -> None:
        rng, vocab = self.rng, self.plan.vocab
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, rng.choice((11, 11, LONGEST_PROMPT))))]
        if self.streams and rng.random() < 0.5:
            prompt = [*rng.choice(list(self.streams.values())).prompt, *prompt[:3]][:LONGEST_PROMPT]
        params = SamplingParams(
            max_tokens=rng.randint(1, MOST_TOKENS),
            seed=rng.randrange(4),
            stop_token_ids=(rng.randrange(vocab),),
            logprobs=0 if sum(prompt) % 2 else None,
            prompt_logprobs=0 if sum(prompt) % 3 else None,
        )
        choice = SpeculationChoice(
            policy=rng.choice(self.plan.settings.allowed_policies), num_speculative_tokens=rng.choice((None, 1, 2, 4))
        )
        self.streams[key] = Stream(tuple(prompt), params, choice)
        self._submit(key)
        if rng.random() < self.plan.cancels:
            self.network.soon(0.1, 4.0, lambda: self._cancel(key))

    def _submit(self, key: str) -> None:
        """A new stream, or the rest of one; nothing if it has ended."""
        stream = self.streams[key]
        if not stream.finished:
            message = Submit(
                key=key,
                prompt=stream.prompt,
                params=stream.params,
                emitted=tuple(stream.tokens),
                speculation=stream.choice,
            )
            self.network.deliver(key, COORDINATOR, lambda: self._event(events.FromClient(key, message)))

    def _cancel(self, key: str) -> None:
        self.streams[key].cancelled = True
        self.network.deliver(key, COORDINATOR, lambda: self._event(events.FromClient(key, Cancel(key=key))))

    def _output(self, output: Output) -> None:
        stream = self.streams[output.key]
        if stream.finished:
            raise Violation(f"{output.key}: a message after the terminal one: {output}")
        if output.start != len(stream.tokens):
            raise Violation(f"{output.key}: output at {output.start}, has {len(stream.tokens)}")
        stream.tokens += output.tokens
        stream.logprobs += output.logprobs
        stream.prompt_logprobs += unpack_logprobs(output.prompt_logprobs)
        stream.finished = output.finish_reason
