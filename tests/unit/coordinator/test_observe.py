"""Spans say what became of the tokens that their work brought, and the sums are those of `Usage`."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest

from distspec.coordinator import events
from distspec.coordinator.context import Settings
from distspec.coordinator.events import Command, Event
from distspec.coordinator.machine import Machine
from distspec.coordinator.observe import Observer
from distspec.protocol.messages import Draft, Drafted, Extend, Progress, Received, ReceiveKV
from distspec.protocol.values import Usage
from distspec.sim.plan import random_plan
from distspec.sim.world import World
from distspec.trace import Span, Trace
from tests.machines import Bench, drafted, says, submit, verdict

VERDICTS = ("prefill", "decode", "verify")


class Watched(Machine):
    """A machine that an observer looks at, as the loop lets it."""

    def __init__(self, settings: Settings, term: int) -> None:
        super().__init__(settings, term)
        self.observer = Observer(Trace())

    def handle(self, event: Event, now: float) -> list[Command]:
        commands = super().handle(event, now)
        self.observer.handled(event, commands, self.notes, now, 0.0)
        return commands


class Exchange(Bench):
    """A request that was prefilled, whose first token is 8, and its workers as the test lets them speak."""

    def __init__(self, *workers: str, policy: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.machine = self.watched = Watched(self.settings, 1)
        for worker in workers:
            self.join(worker)
        self.handle(submit(policy=policy))
        self.judge("decode", 8)

    def asked(self, kind: type, worker: str) -> Any:
        """What the worker was last asked."""
        return next(message for name, message in self.sent[::-1] if name == worker and isinstance(message, kind))

    def judge(self, worker: str, root: int | None, *outcomes: int) -> int:
        """The worker answers its last Extend, with an outcome for each of its nodes. Returns the task."""
        ask = self.asked(Extend, worker)
        pairs = zip((node.id for node in ask.nodes), outcomes, strict=True)
        self.handle(verdict(worker, ask.task, root, *pairs))
        return int(ask.task)

    def draw(self, *tokens: int, base: int) -> int:
        """The drafter answers its last Draft with a chain. Returns the task."""
        task = self.asked(Draft, "draft").task
        self.handle(drafted(task, *tokens, base=base))
        return int(task)

    def arrive(self, worker: str) -> None:
        """The verifier has the request's KV."""
        self.handle(says(worker, Received(request=1, epoch=0, ticket=self.asked(ReceiveKV, worker).ticket)))

    def spans(self) -> dict[int | None, Span]:
        return {span.task: span for span in self.watched.observer.spans() if span.task is not None}


def use(span: Span) -> tuple[str, int | None, int, object]:
    return span.name, span.brought, span.kept, span.args["accepted"]


def test_of_a_round_that_was_half_right_half_is_kept() -> None:
    exchange = Exchange("decode", "draft", policy="sd")
    draft = exchange.draw(9, 10, base=4)
    verify = exchange.judge("decode", 9, 11, 12)  # 9 was right; 11 comes after it, not 10
    spans = exchange.spans()
    assert use(spans[draft]) == ("draft", 2, 1, 1)
    assert use(spans[verify]) == ("verify", 3, 2, 1)
    assert use(spans[1]) == ("prefill", 1, 1, 0)


def test_of_a_round_that_was_wrong_only_the_targets_own_token_is_kept() -> None:
    exchange = Exchange("decode", "draft", policy="sd")
    draft = exchange.draw(20, 21, base=4)
    verify = exchange.judge("decode", 9, 11, 12)
    spans = exchange.spans()
    assert use(spans[draft]) == ("draft", 2, 0, 0)
    assert use(spans[verify]) == ("verify", 3, 1, 0)
    assert (spans[draft].use, round(spans[verify].use, 2)) == (0.0, 0.33)


def test_of_two_futures_that_judge_one_node_the_first_is_kept() -> None:
    """dsi asks for the root alone at home, and for it and the node below it at the verifier."""
    exchange = Exchange("decode", "verify", "draft", policy="dsi")
    exchange.arrive("verify")
    exchange.draw(9, base=4)
    home = exchange.asked(Extend, "decode").task
    verify = exchange.judge("verify", 9, 33)
    exchange.handle(verdict("decode", home, 9))
    assert use(exchange.spans()[verify]) == ("verify", 2, 2, 1)
    assert use(exchange.spans()[home]) == ("decode", 1, 0, 0)


def test_a_second_verdict_of_a_node_that_still_waits_earns_nothing() -> None:
    exchange = Exchange("decode", "verify1", "verify2", "draft", policy="dsi")
    exchange.arrive("verify1")
    exchange.arrive("verify2")
    exchange.draw(9, base=4)
    exchange.draw(9, 10, base=4)
    first = exchange.judge("verify1", None, 10)
    second = exchange.judge("verify2", None, 10, 11)
    exchange.judge("decode", 9)
    assert use(exchange.spans()[first]) == ("verify", 1, 1, 1)
    assert use(exchange.spans()[second]) == ("verify", 2, 1, 0)


@pytest.mark.parametrize(("root", "kept"), [(9, 1), (30, 0)])
def test_a_future_below_a_rejected_node_is_wasted_and_one_below_an_accepted_node_kept(root: int, kept: int) -> None:
    exchange = Exchange("decode", "verify", "draft", policy="dsi")
    exchange.arrive("verify")
    draft = exchange.draw(9, base=4)
    ahead = exchange.asked(Extend, "verify")
    home = exchange.judge("decode", root)
    exchange.handle(verdict("verify", ahead.task, 9, (ahead.nodes[0].id, 33)))
    spans = exchange.spans()
    assert use(spans[home]) == ("decode", 1, 1, kept)
    assert use(spans[ahead.task]) == ("verify", 2, kept, 0)
    assert use(spans[draft]) == ("draft", 1, kept, kept)


def sums(watched: Watched, metric: str) -> dict[tuple[str, ...], float]:
    families = watched.observer.metrics(watched.snapshot())
    [family] = [family for family in families if family.name == metric]
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def test_a_step_that_serves_two_requests_makes_its_worker_busy_once() -> None:
    watched = Watched(Settings(), 1)
    for request in (1, 2):
        progress = Progress(request=request, epoch=0, start=1, tokens=(9,), span=(10.0, 12.0))
        watched.handle(says("decode", progress), 13.0)
    assert sums(watched, "distspec_busy_seconds_total") == {("decode", "target"): 2.0}


def test_a_leased_round_tells_when_its_own_drafter_worked() -> None:
    watched = Watched(Settings(), 1)
    times = {"drafting": (10.0, 11.0), "span": (11.5, 13.0)}
    progress = Progress(request=1, epoch=0, start=1, tokens=(9, 10), drafted=(3,), accepted=(1,), **times)
    watched.handle(says("decode", progress), 13.0)
    assert sums(watched, "distspec_busy_seconds_total") == {("decode", "target"): 1.5, ("decode", "drafter"): 1.0}
    assert sums(watched, "distspec_judged_nodes_total") == {(): 3}
    spans = {span.name: span for span in watched.observer.spans()}
    assert (spans["draft"].start_s, spans["draft"].end_s, spans["draft"].brought) == (10.0, 11.0, None)


def test_judged_nodes_are_those_of_every_verdict() -> None:
    exchange = Exchange("decode", "verify1", "verify2", "draft", policy="dsi")
    exchange.arrive("verify1")
    exchange.arrive("verify2")
    exchange.draw(9, base=4)
    exchange.draw(9, 10, base=4)
    exchange.judge("verify1", None, 10)
    exchange.judge("verify2", None, 10, 11)  # the first node again, on the way to the second
    exchange.judge("decode", 9)
    assert sums(exchange.watched, "distspec_judged_nodes_total") == {(): 3}


@pytest.mark.parametrize(("policy", "hits"), [("sd", 0), ("ssd", 1)])
def test_a_round_that_ends_on_a_drafted_token_is_a_hit(policy: str, hits: int) -> None:
    """Both judge 9 alone; ssd has the drafter go on below it meanwhile, and 10 is there when the verdict says so."""
    exchange = Exchange("decode", "draft", policy=policy, steps=1, lookahead=1, branch_topk=1, branch_width=1)
    exchange.draw(9, base=4)
    if policy == "ssd":
        exchange.draw(9, 10, base=4)
    exchange.judge("decode", 9, 10)
    assert exchange.usages[-1] is not None
    assert (exchange.usages[-1].rounds, exchange.usages[-1].hits) == (1, hits)


def test_an_answer_that_comes_twice_is_counted_once() -> None:
    exchange = Exchange("decode", "draft", policy="sd")
    task = exchange.draw(9, 10, base=4)
    exchange.handle(drafted(task, 9, 10, base=4))
    exchange.judge("decode", 9, 10, 12)
    drafts = [span for span in exchange.watched.observer.spans() if span.name == "draft"]
    assert [(span.brought, span.kept) for span in drafts] == [(2, 2), (0, 0)]


def test_nonsense_brings_nothing() -> None:
    exchange = Exchange("decode", "draft", policy="sd")
    task = exchange.asked(Draft, "draft").task
    exchange.handle(says("draft", Drafted(request=1, epoch=0, task=task, base=4, tokens=(9,), parents=(5,))))
    assert exchange.spans()[task].brought == 0
    assert exchange.spans()[task].use == 0.0


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_what_spans_say_was_accepted_and_kept_is_what_the_stream_got(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 100):
        usages: dict[str, Usage] = {}

        def note(
            term: int, event: Event, now: float, commands: list[Command], usages: dict[str, Usage] = usages
        ) -> None:
            outputs = [command.message for command in commands if isinstance(command, events.ToClient)]
            usages.update({output.key: output.usage for output in outputs if output.usage is not None})

        world = World(replace(random_plan(seed), coordinator_deaths=0), seed, Watched, note)
        streams = world.run()
        assert isinstance(world.machine, Watched)
        of: defaultdict[int | None, list[Span]] = defaultdict(list)
        for span in world.machine.observer.spans():
            of[span.request].append(span)
            seen[span.name] += 1
            seen["wasted"] += span.use == 0
        for spans in of.values():
            keys = {span.args["key"] for span in spans if span.name == "queue"}
            if not keys:
                continue  # it was cancelled before any worker had it
            (key,) = keys
            usage = usages.get(str(key), Usage())
            judged = [span for span in spans if span.name in (*VERDICTS, "round")]
            drawn = [span for span in spans if span.name in ("draft", "round")]
            assert sum(int(span.args.get("accepted", 0)) for span in judged) == usage.accepted, (seed, key)
            assert sum(int(span.args.get("accepted", 0)) for span in drawn) == usage.accepted, (seed, key)
            assert sum(span.kept for span in judged) == len(streams[str(key)].tokens), (seed, key)
            assert sum(int(s.args["tokens"]) for s in spans if s.name == "commit") == len(streams[str(key)].tokens)
            assert all(span.kept <= (span.brought or 0) for span in judged + drawn)
    assert all(seen[kind] for kind in (*VERDICTS, "draft", "round", "transfer", "queue", "wasted")), seen
