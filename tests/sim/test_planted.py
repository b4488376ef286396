"""The simulator is worth what it catches: each fault planted in the machine must make some schedule fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from distspec.coordinator import answers, driving, feeding, lifecycle, machine
from distspec.coordinator.admission import Credits
from distspec.coordinator.context import Context
from distspec.coordinator.feed import Feed
from distspec.coordinator.machine import Machine
from distspec.coordinator.request import Request
from distspec.errors import IllegalTransition
from distspec.sim.plan import random_plan
from distspec.sim.violation import Violation
from distspec.sim.world import World

TRIES = 1500


def _forget_the_epoch_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Machine, "_is_of_now", lambda self, request, worker, message: True)


def _forget_the_incarnation_check(patch: pytest.MonkeyPatch) -> None:
    honest = Machine._from_worker

    def trusting(self: Machine, event: Any) -> None:
        worker = self._ctx.credits.workers.get(event.worker)
        if worker is not None:
            event = type(event)(event.worker, worker.hello.incarnation, event.message)
        honest(self, event)

    patch.setattr(Machine, "_from_worker", trusting)


def _drop_the_verdict_of_a_surviving_branch(patch: pytest.MonkeyPatch) -> None:
    honest = answers.verdict

    def strict(request: Request, message: Any) -> bool:
        task = request.tasks.get(message.task)
        if task is not None and task.root != request.tree.root:
            del request.tasks[message.task]
            return True
        return honest(request, message)

    patch.setattr(machine.answers, "verdict", strict)


def _commit_a_node_that_the_worker_never_computed(patch: pytest.MonkeyPatch) -> None:
    honest = Request.commit

    def generous(self: Request, step: Any) -> Any:
        for hold in self.holds.values():
            if step.node is not None and hold.computed == len(self.tokens):
                hold.nodes.add(step.node)
        return honest(self, step)

    patch.setattr(Request, "commit", generous)


def _spend_a_credit_twice(patch: pytest.MonkeyPatch) -> None:
    honest = Credits.take

    def free(self: Credits, worker: str, request: int, tokens: int) -> None:
        honest(self, worker, request, tokens)
        if request % 2:
            self.workers[worker].out -= 1

    patch.setattr(Credits, "take", free)


def _return_a_credit_twice(patch: pytest.MonkeyPatch) -> None:
    honest = Context.close

    def eager(self: Context, request: Request, worker: str) -> None:
        was_opened = request.holds[worker].opened
        honest(self, request, worker)
        if was_opened and worker in self.credits.workers:
            self.credits.give_back(worker)

    patch.setattr(Context, "close", eager)


def _forget_to_drop_dead_nodes(patch: pytest.MonkeyPatch) -> None:
    honest = Request.commit

    def forgetful(self: Request, step: Any) -> Any:
        found = honest(self, step)
        for hold in self.holds.values():
            hold.drop.clear()
        return found

    patch.setattr(Request, "commit", forgetful)


def _transfer_one_token_less(patch: pytest.MonkeyPatch) -> None:
    honest = lifecycle.received

    def hasty(ctx: Context, request: Request, worker: str) -> None:
        request.holds[worker].computed += 1
        honest(ctx, request, worker)

    patch.setattr(machine.lifecycle, "received", hasty)


def _send_kv_that_is_still_being_computed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "computed_by", lambda self, worker: self.holds[worker].computed)


def _send_kv_of_nodes_that_the_source_was_not_told_to_commit(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: Request, worker: str) -> int:
        bases = [task.base for task in self.tasks.values() if task.worker == worker]
        return min(bases, default=self.holds[worker].computed)

    patch.setattr(Request, "computed_by", hasty)


def _send_features_that_are_still_being_computed(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: Request, worker: str) -> int:
        return max(self.computed_by(worker), self.holds[worker].computed)

    patch.setattr(Request, "has_judged", hasty)


def _forget_that_a_source_of_features_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "unfeed", lambda self, worker: None)


def _ignore_lost_features(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(feeding, "lost", lambda ctx, request, ticket: False)


def _send_lost_features_no_more(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Feed, "_rewind", lambda self, start: self.tickets.clear())


def _draft_past_the_end(patch: pytest.MonkeyPatch) -> None:
    situation, graft = driving.situation, Request.graft

    def endlessly(request: Request, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        params, request.params = request.params, structs.replace(request.params, max_tokens=1000)
        try:
            return call(*args, **kwargs)
        finally:
            request.params = params

    def unbounded(ctx: Context, request: Request) -> Any:
        return endlessly(request, situation, ctx, request)

    def deep(self: Request, *args: Any, **kwargs: Any) -> Any:
        return endlessly(self, graft, self, *args, **kwargs)

    patch.setattr(driving, "situation", unbounded)
    patch.setattr(Request, "graft", deep)


def _forget_the_limits_of_an_early_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lifecycle, "fit", lambda ctx: None)


FAULTS: list[Callable[[pytest.MonkeyPatch], None]] = [
    _forget_the_epoch_check,
    _forget_the_incarnation_check,
    _drop_the_verdict_of_a_surviving_branch,
    _commit_a_node_that_the_worker_never_computed,
    _spend_a_credit_twice,
    _return_a_credit_twice,
    _forget_to_drop_dead_nodes,
    _transfer_one_token_less,
    _send_kv_that_is_still_being_computed,
    _send_kv_of_nodes_that_the_source_was_not_told_to_commit,
    _send_features_that_are_still_being_computed,
    _forget_that_a_source_of_features_left,
    _ignore_lost_features,
    _send_lost_features_no_more,
    _draft_past_the_end,
    _forget_the_limits_of_an_early_request,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_fault_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch) -> None:
    plant(monkeypatch)
    for seed in range(TRIES):
        try:
            World(random_plan(seed), seed).run(limit_s=500.0)
        except (Violation, IllegalTransition):
            return  # anything else: a plant that does not fit the code any more, which proves nothing
    pytest.fail(f"{TRIES} schedules ran as if nothing were wrong")
