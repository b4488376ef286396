"""What the coordinator sees, as spans and metrics. Knows messages and notes; changes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace

from distspec.coordinator import events
from distspec.coordinator.busy import Busy
from distspec.coordinator.events import Command, Event
from distspec.coordinator.notes import Emitted, Grown, Note, Queued
from distspec.metrics import Family, Registry
from distspec.protocol.messages import Draft, Drafted, Extend, Lease, Output, Progress, Received, Verdict
from distspec.protocol.values import ROOT
from distspec.trace import Span, Trace

Args = dict[str, int | float | str]
Interval = tuple[float, float]
V = TypeVar("V")

_REMEMBERED = 100_000


@dataclass(slots=True)
class _Work:
    """A future, asked for or answered, and what came of it so far."""

    kind: str
    args: Args = field(default_factory=dict)
    brought: int = 0
    kept: int = 0
    accepted: int = 0
    answered: bool = False


class Observer:
    """Spans of every wait, prefill, decode, verify, draft, transfer, leased round and commit; counts and durations.

    What a future brought may be kept long after it was answered, so spans are told the rest when they are asked for.
    A token that is not decided yet counts as not kept.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._work: OrderedDict[int, _Work] = OrderedDict()
        self._waiting: OrderedDict[int, tuple[str, float]] = OrderedDict()
        self._busy: dict[tuple[str, str], Busy] = {}
        self._registry = Registry()
        add = self._registry
        self._handle_s = add.histogram("distspec_handle_seconds", "The machine, per event")
        self._work_s = add.histogram("distspec_work_seconds", "Work of a worker, as it measured it", ["kind"])
        self._busy_s = add.counter(
            "distspec_busy_seconds_total", "Time that a worker computed, as it measured it", ["worker", "model"]
        )
        self._judged = add.counter("distspec_judged_nodes_total", "Drafted nodes that targets judged, repeats included")
        self._first_s = add.histogram("distspec_time_to_first_token_seconds", "From submission to the first token")
        self._total_s = add.histogram("distspec_request_seconds", "From submission to the last token")
        self._tokens = add.counter("distspec_generated_tokens_total", "Tokens sent to clients")
        self._ended = add.counter("distspec_requests_ended_total", "Requests by how they ended", ["reason"])
        self._drafted = add.counter("distspec_drafted_tokens_total", "Drafted tokens that were judged")
        self._accepted = add.counter("distspec_accepted_tokens_total", "Drafted tokens that were accepted")

    def handled(
        self, event: Event, commands: Sequence[Command], notes: Sequence[Note], now_s: float, took_s: float
    ) -> None:
        """An event was handled and its commands queued; took_s covers both. now_s: wall clock, at their end."""
        self._handle_s.observe(took_s)
        for note in notes:
            self._note(note, now_s, took_s)
        for command in commands:
            if isinstance(command, events.ToClient):
                self._output(command.message)
            elif isinstance(command, events.ToWorker):
                self._sent(command, now_s)
        if isinstance(event, events.FromWorker):
            self._answered(event, notes)

    def spans(self) -> list[Span]:
        """All spans that are remembered, with what became of their tokens by now."""
        return [self._told(span) for span in self.trace.spans()]

    def metrics(self, snapshot: dict[str, Any]) -> list[Family]:
        """All metrics, those of the machine's snapshot among them."""
        state = Registry()
        state.gauge("distspec_requests_queued", "Requests that wait for a worker").set(snapshot["queued"])
        state.gauge("distspec_requests_open", "Requests that are not ended").set(len(snapshot["requests"]))
        state.gauge("distspec_term", "Life of the coordinator").set(snapshot["term"])
        state.gauge("distspec_acceptance", "How often a draft is right if those before it were").set(
            snapshot["acceptance"]
        )
        used = state.gauge("distspec_worker_requests", "Requests open on a worker", ["worker", "role"])
        for name, worker in snapshot["workers"].items():
            used.set(worker["open"], worker=name, role=worker["role"])
        for name, value in snapshot["counters"].items():
            state.counter(f"distspec_{name}_total", f"Of the coordinator: {name.replace('_', ' ')}").add(value)
        return self._registry.snapshot() + state.snapshot()

    def _note(self, note: Note, now_s: float, took_s: float) -> None:
        if isinstance(note, Queued):
            _remember(self._waiting, note.request, (note.key, now_s))
        elif isinstance(note, Emitted):
            self._tokens.add(note.tokens)
            self.trace.add(Span("commit", now_s - took_s, now_s, "coordinator", note.request, {"tokens": note.tokens}))
        elif note.task in self._work:
            work = self._work[note.task]
            if isinstance(note, Grown):
                work.brought += note.nodes
            else:
                work.kept += 1
                work.accepted += note.accepted

    def _sent(self, command: events.ToWorker, now_s: float) -> None:
        message = command.message
        if isinstance(message, Draft):
            _remember(self._work, message.task, _Work("draft", {"steps": message.shape.steps}))
        elif isinstance(message, Extend):
            kind = "verify" if message.nodes else "prefill" if len(message.tokens) > 1 else "decode"
            sizes: Args = {"tokens": len(message.tokens), "nodes": len(message.nodes)}
            _remember(self._work, message.task, _Work(kind, sizes))
        if isinstance(message, Extend | Lease) and message.request in self._waiting:
            key, since_s = self._waiting.pop(message.request)
            self.trace.add(Span("queue", since_s, now_s, "coordinator", message.request, {"key": key}))

    def _answered(self, event: events.FromWorker, notes: Sequence[Note]) -> None:
        """A worker reported work that it has done."""
        message = event.message
        if isinstance(message, Verdict):
            self._judged.add(sum(node != ROOT for node, _ in message.outcomes))
        if isinstance(message, Verdict | Drafted):
            work = self._work.get(message.task)
            if work is None or work.answered:  # forgotten, or nonsense
                self._span("verify" if isinstance(message, Verdict) else "draft", event.worker, message, {}, brought=0)
                return
            work.answered = True
            if isinstance(message, Verdict):
                work.brought = len(message.outcomes)
            self._span(work.kind, event.worker, message, work.args, task=message.task)
        elif isinstance(message, Progress):
            kept = sum(n.tokens for n in notes if isinstance(n, Emitted) and n.request == message.request)
            rounds: Args = {"nodes": sum(message.drafted), "accepted": sum(message.accepted) if kept else 0}
            brought = max(sum(message.drafted) + len(message.drafted), len(message.tokens))
            self._judged.add(sum(message.drafted))
            if any(message.drafting):
                self._add("draft", event.worker, message.request, message.drafting, {"nodes": sum(message.drafted)})
            self._span("round", event.worker, message, rounds, brought=brought, kept=kept)
        elif isinstance(message, Received):
            self._span("transfer", event.worker, message, {})

    def _span(
        self,
        kind: str,
        worker: str,
        message: Verdict | Drafted | Progress | Received,
        args: Args,
        **tokens: int,
    ) -> None:
        self._add(kind, worker, message.request, message.span, args, **tokens)

    def _add(self, kind: str, worker: str, request: int, span: Interval, args: Args, **tokens: int) -> None:
        start_s, end_s = span
        self._work_s.observe(end_s - start_s, kind=kind)
        if kind != "transfer":
            model = "drafter" if kind == "draft" else "target"
            busy = self._busy.setdefault((worker, model), Busy())
            self._busy_s.add(busy.add(start_s, end_s), worker=worker, model=model)
        self.trace.add(Span(kind, start_s, end_s, worker, request, args, **tokens))

    def _told(self, span: Span) -> Span:
        work = self._work.get(span.task) if span.task is not None else None
        if work is None:
            return span
        return replace(span, args={**span.args, "accepted": work.accepted}, brought=work.brought, kept=work.kept)

    def _output(self, output: Output) -> None:
        if output.finish_reason is not None:
            self._ended.add(reason=output.finish_reason)
        if output.finish_reason is not None and output.usage is not None:
            self._first_s.observe(output.usage.first_token_s)
            self._total_s.observe(output.usage.total_s)
            self._drafted.add(output.usage.drafted)
            self._accepted.add(output.usage.accepted)


def _remember(known: OrderedDict[int, V], number: int, value: V) -> None:
    """What is never answered is forgotten in the end."""
    known[number] = value
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
