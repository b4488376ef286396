"""What the coordinator sees, as spans and metrics. Knows messages; changes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from distspec.coordinator import events
from distspec.coordinator.events import Command
from distspec.metrics import Family, Registry
from distspec.protocol.messages import Draft, Drafted, Extend, Message, Output, Progress, Received, Verdict
from distspec.trace import Span, Trace

_OPEN_TASKS = 10_000


class Observer:
    """Spans of every prefill, decode, verify, draft, transfer, leased round and commit; counts and durations."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._tasks: OrderedDict[int, tuple[str, dict[str, int]]] = OrderedDict()
        self._registry = Registry()
        add = self._registry
        self._handle_s = add.histogram("distspec_handle_seconds", "The machine, per event")
        self._work_s = add.histogram("distspec_work_seconds", "Work of a worker, as it measured it", ["kind"])
        self._first_s = add.histogram("distspec_time_to_first_token_seconds", "From submission to the first token")
        self._total_s = add.histogram("distspec_request_seconds", "From submission to the last token")
        self._tokens = add.counter("distspec_generated_tokens_total", "Tokens sent to clients")
        self._ended = add.counter("distspec_requests_ended_total", "Requests by how they ended", ["reason"])
        self._drafted = add.counter("distspec_drafted_tokens_total", "Drafted tokens that were judged")
        self._accepted = add.counter("distspec_accepted_tokens_total", "Drafted tokens that were accepted")

    def handled(self, commands: Sequence[Command], now_s: float, took_s: float) -> None:
        """An event was handled and its commands queued; took_s covers both. now_s: wall clock."""
        self._handle_s.observe(took_s)
        for command in commands:
            if isinstance(command, events.ToClient):
                self._output(command.message, now_s, took_s)
            elif isinstance(command, events.ToWorker) and isinstance(command.message, Extend | Draft):
                self._remember(command.message)

    def reply(self, worker: str, message: Message) -> None:
        """A worker reported work that it has done."""
        if isinstance(message, Verdict | Drafted):
            kind, args = self._tasks.pop(message.task, ("verify" if isinstance(message, Verdict) else "draft", {}))
            self._span(kind, worker, message, args)
        elif isinstance(message, Progress):
            self._span("round", worker, message, {"tokens": len(message.tokens)})
        elif isinstance(message, Received):
            self._span("transfer", worker, message, {})

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

    def _remember(self, message: Extend | Draft) -> None:
        if isinstance(message, Draft):
            kind, args = "draft", {"steps": message.shape.steps}
        else:
            kind = "verify" if message.nodes else "prefill" if len(message.tokens) > 1 else "decode"
            args = {"tokens": len(message.tokens), "nodes": len(message.nodes)}
        self._tasks[message.task] = kind, args
        if len(self._tasks) > _OPEN_TASKS:  # tasks of the dead are never answered
            self._tasks.popitem(last=False)

    def _span(
        self, kind: str, worker: str, message: Verdict | Drafted | Progress | Received, args: dict[str, int]
    ) -> None:
        start_s, end_s = message.span
        self._work_s.observe(end_s - start_s, kind=kind)
        self.trace.add(Span(kind, start_s, end_s, worker, message.request, {**args}))

    def _output(self, output: Output, now_s: float, took_s: float) -> None:
        if output.tokens:
            self._tokens.add(len(output.tokens))
            args: dict[str, int | float | str] = {"tokens": len(output.tokens), "key": output.key}
            self.trace.add(Span("commit", now_s - took_s, now_s, "coordinator", None, args))
        if output.finish_reason is not None:
            self._ended.add(reason=output.finish_reason)
        if output.finish_reason is not None and output.usage is not None:
            self._first_s.observe(output.usage.first_token_s)
            self._total_s.observe(output.usage.total_s)
            self._drafted.add(output.usage.drafted)
            self._accepted.add(output.usage.accepted)
