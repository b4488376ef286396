"""The machine as a whole: who is let in, how a request ends in every state, what stale messages do (nothing)."""

from __future__ import annotations

from typing import Any

import pytest

from distspec.coordinator import events
from distspec.coordinator.request import State
from distspec.errors import IllegalTransition
from distspec.protocol.messages import (
    Drafted,
    Drop,
    Extend,
    Fault,
    Freed,
    Lease,
    Output,
    Progress,
    Received,
    Refused,
    Revoked,
    TransferLost,
    Verdict,
)
from tests.machines import PROMPT, Bench, cancel, drafted, kinds, left, says, submit, verdict

LIVE = [state for state in State if state is not State.DONE]


def reach(state: State) -> Bench:
    """A bench whose request 1 is in this state."""
    if state is State.QUEUED:
        bench = Bench()
        bench.handle(submit(policy="sd"))
        bench.join("draft")
    elif state in (State.PREFILL, State.TRANSFER):
        bench = Bench("prefill", "decode", "draft")
        bench.handle(submit(policy="sd"))
        if state is State.TRANSFER:
            bench.handle(verdict("prefill", 1, 8))
    elif state is State.DRIVEN:
        bench = Bench("decode", "verify", "draft")
        bench.handle(submit(policy="sd"))
        bench.handle(verdict("decode", 1, 8))
        bench.handle(drafted(3, 9, 10))
    else:
        bench = Bench("decode")
        bench.handle(submit(policy="sd"))
        bench.handle(verdict("decode", 1, 8))
        bench.join("draft")
        if state is State.REVOKING:
            bench.handle(events.Tick())
    request = bench.machine.request(1)
    assert request is not None
    assert request.state is state
    return bench


def errors(commands: list[tuple[str, Any]]) -> list[tuple[str, str | None]]:
    """(code, field) of terminal errors."""
    return [(m.error[0], m.error[2]) for _, m in commands if isinstance(m, Output) and m.error is not None]


# -- who is let in ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (5, 50)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"prompt": (1,) * 100}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"policy": "warp"}, "speculation.policy"),
        ({"policy": "dsi"}, "speculation.policy"),
        ({"wide": 0}, "speculation.num_speculative_tokens"),
        ({"wide": 9}, "speculation.num_speculative_tokens"),
        ({"key": "known"}, "key"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_by_field_and_reaches_no_worker(change: dict[str, Any], field: str) -> None:
    bench = Bench("decode", allowed_policies=("ar", "sd"))
    bench.handle(submit(key="known"))
    requests = bench.machine.snapshot()["requests"]
    commands = bench.handle(submit(**change))
    assert errors(commands) == [("invalid_value", field)]
    assert kinds(commands) == [("c", "Output")]
    assert bench.machine.snapshot()["requests"] == requests


def test_two_clients_may_use_one_key() -> None:
    bench = Bench("decode")
    bench.handle(submit(key="a"))
    other = events.FromClient("d", submit(key="a").message)
    assert kinds(bench.handle(other)) == [("decode", "Extend")]


def test_a_full_queue_refuses_new_requests_but_not_the_rest_of_old_ones() -> None:
    bench = Bench(max_queued_requests=1)
    assert bench.handle(submit(key="a")) == []
    assert errors(bench.handle(submit(key="b"))) == [("overloaded", None)]
    assert bench.handle(submit(key="c", emitted=(8,))) == []
    assert bench.machine.snapshot()["queued"] == 2


def test_requests_wait_for_credits_in_order_and_each_takes_one() -> None:
    bench = Bench()
    bench.join("decode", slots=1)
    for key in "abc":
        bench.handle(submit(key=key))
    assert (bench.machine.snapshot()["queued"], bench.open("decode")) == (2, 1)
    commands = bench.handle(cancel("a"))
    assert kinds(commands) == [("c", "Output"), ("decode", "Drop")]  # its credit is out until it is freed
    ((_, message),) = bench.handle(says("decode", Freed(request=1, epoch=0)))
    assert (message.request, bench.open("decode")) == (2, 1)


def test_max_tokens_is_cut_to_what_the_context_leaves() -> None:
    bench = Bench("decode")
    ((_, message),) = bench.handle(submit((1,) * 98, max_tokens=50))
    assert message.params.max_tokens == 2


def test_requests_that_came_before_any_worker_are_held_to_the_limits_when_one_joins() -> None:
    bench = Bench()
    bench.handle(submit((1,) * 98, key="cut", max_tokens=50))
    bench.handle(submit((1,) * 100, key="long"))
    bench.handle(submit((1, 60), key="foreign"))
    bench.handle(submit((1,) * 98, key="whole", emitted=(8, 9), max_tokens=50))
    bench.join("draft")
    assert bench.machine.snapshot()["queued"] == 4
    commands = bench.join("decode")
    assert errors(commands) == [("invalid_value", "prompt")] * 2
    ended = {m.key: m.finish_reason for _, m in commands if isinstance(m, Output)}
    assert ended == {"long": "error", "foreign": "error", "whole": "length"}
    ((_, message),) = [(name, m) for name, m in commands if isinstance(m, Extend)]
    assert message.params is not None
    assert message.params.max_tokens == 2


def test_a_deserted_fleet_says_so_instead_of_letting_requests_wait() -> None:
    bench = Bench("decode", unavailable_s=60.0)
    bench.handle(events.Tick())
    bench.handle(left("decode"))
    assert bench.handle(submit(key="a")) == []
    bench.now_s = 59.0
    assert bench.handle(events.Tick()) == []
    bench.now_s = 61.0
    assert errors(bench.handle(events.Tick())) == [("unavailable", None)]
    assert errors(bench.handle(submit(key="b"))) == [("unavailable", None)]
    bench.join("decode", 2)
    assert kinds(bench.handle(submit(key="c"))) == [("decode", "Extend")]


# -- how requests end -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "client left"])
@pytest.mark.parametrize("state", LIVE)
def test_a_request_can_be_aborted_in_every_state_and_frees_everything(state: State, how: str) -> None:
    bench = reach(state)
    commands = bench.handle(cancel() if how == "cancel" else events.ClientLeft("c"))
    outputs = [message for name, message in commands if name == "c"]
    assert [message.finish_reason for message in outputs] == ["abort"]
    assert outputs[0].tokens == ()
    assert all(isinstance(message, Drop) for name, message in commands if name != "c")
    bench.free_all()
    snapshot = bench.machine.snapshot()
    assert (snapshot["requests"], snapshot["queued"]) == ({}, 0)
    assert all(worker["open"] == 0 for worker in snapshot["workers"].values())
    assert bench.handle(cancel()) == []


@pytest.mark.parametrize("state", LIVE)
def test_whoever_dies_the_request_goes_on_and_no_credit_is_lost(state: State) -> None:
    for name in reach(state).machine.snapshot()["workers"]:
        bench = reach(state)
        bench.handle(left(name))
        bench.free_all()
        bench.join(name, 2)
        assert bench.machine.request(1) is not None
        bench.handle(cancel())
        bench.free_all()
        assert all(worker["open"] == 0 for worker in bench.machine.snapshot()["workers"].values())


# -- what is stale ----------------------------------------------------------------------------------

STALE = [
    Verdict(request=1, epoch=0, task=99, outcomes=((-1, 3), (2, 4)), cached=2),
    Drafted(request=1, epoch=0, task=1, base=3, tokens=(3,), parents=(-1,)),
    Progress(request=1, epoch=99, start=1, tokens=(3,), drafted=(0,), accepted=(0,)),
    Revoked(request=1, epoch=99, length=1, computed=3),
    Received(request=1, epoch=0, ticket=99),
    TransferLost(request=1, epoch=0, ticket=99, reason="link"),
]
UNKNOWN = [type(m)(**{**{f: getattr(m, f) for f in m.__struct_fields__}, "request": 77}) for m in STALE]
ENDS = [
    Freed(request=1, epoch=0),
    Refused(request=1, epoch=0, reason="pages"),
    TransferLost(request=1, epoch=0, ticket=2, reason="link", freed=True),
]


@pytest.mark.parametrize("message", [*STALE, *UNKNOWN], ids=lambda m: f"{type(m).__name__} of {m.request}")
@pytest.mark.parametrize("state", LIVE)
def test_a_stale_message_changes_nothing(state: State, message: Any) -> None:
    bench = reach(state)
    before = bench.state()
    for worker in bench.machine.snapshot()["workers"]:
        assert bench.handle(says(worker, message)) == []
    assert bench.state() == before


@pytest.mark.parametrize("message", [*STALE, *ENDS, Fault(reason="x")], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("state", LIVE)
def test_nothing_that_an_earlier_life_of_a_worker_says_is_heard(state: State, message: Any) -> None:
    bench = reach(state)
    before = bench.state()
    for worker in bench.machine.snapshot()["workers"]:
        assert bench.handle(says(worker, message, incarnation=0)) == []
        assert bench.handle(left(worker, incarnation=0)) == []
    assert bench.handle(says("stranger", message)) == []
    assert bench.state() == before


@pytest.mark.parametrize("state", [State.LEASED, State.REVOKING])
def test_a_lease_is_spoken_for_by_its_holder_alone(state: State) -> None:
    bench = reach(state)
    before = bench.state()
    for message in (
        Progress(request=1, epoch=2, start=1, tokens=(3,), drafted=(0,), accepted=(0,)),
        Revoked(request=1, epoch=2, length=1, computed=3),
    ):
        assert bench.handle(says("draft", message)) == []
    assert bench.state() == before


def test_progress_of_an_earlier_lease_changes_nothing() -> None:
    bench = Bench("decode")
    bench.handle(submit())
    bench.handle(verdict("decode", 1, 8))
    old = Progress(request=1, epoch=2, start=1, tokens=(9,), drafted=(0,), accepted=(0,))
    bench.handle(says("decode", Refused(request=1, epoch=2, reason="pages")))
    commands = bench.handle(verdict("decode", 2, 9))
    assert isinstance(commands[-1][1], Lease)
    before = bench.state()
    assert bench.handle(says("decode", old)) == []
    assert bench.state() == before


def test_a_freed_that_nobody_waits_for_raises_and_changes_nothing() -> None:
    bench = Bench("decode")
    before = bench.state()
    with pytest.raises(IllegalTransition, match="decode"):
        bench.handle(says("decode", Freed(request=1, epoch=0)))
    assert bench.state() == before


# -- time, and workers that go ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "owes"),
    [
        (State.PREFILL, "prefill"),
        (State.TRANSFER, "decode"),
        (State.LEASED, "decode"),
        (State.REVOKING, "decode"),
        (State.DRIVEN, "verify"),
        (State.DRIVEN, "decode"),
    ],
)
def test_a_worker_that_owes_an_answer_and_says_nothing_is_suspected(state: State, owes: str) -> None:
    bench = reach(state)
    bench.now_s = bench.settings.task_timeout_s
    assert (owes, "suspect") not in bench.handle(events.Tick())
    bench.now_s += 1
    assert (owes, "suspect") in bench.handle(events.Tick())
    assert (owes, "suspect") not in bench.handle(events.Tick()), "once is enough: a WorkerLeft follows"


def test_who_waits_for_kv_owes_nothing_while_a_busy_prefill_worker_computes_it() -> None:
    bench = reach(State.PREFILL)
    limit = bench.settings.task_timeout_s
    bench.now_s = 0.9 * limit
    bench.handle(says("prefill", Fault(reason="it lives")))
    bench.now_s = 1.1 * limit
    assert bench.handle(events.Tick()) == []
    bench.handle(verdict("prefill", 1, 8))
    assert bench.handle(events.Tick()) == []
    bench.now_s = 2.2 * limit
    assert ("decode", "suspect") in bench.handle(events.Tick())


def test_a_drafter_owes_its_draft() -> None:
    bench = Bench("decode", "draft")
    bench.handle(submit(policy="sd"))
    bench.handle(verdict("decode", 1, 8))
    bench.now_s = 121.0
    assert bench.handle(events.Tick()) == [("draft", "suspect")]


def test_a_worker_that_owes_nothing_or_speaks_is_not_suspected() -> None:
    bench = Bench("decode", "verify")
    bench.handle(submit())
    bench.now_s = 100.0
    bench.handle(says("decode", Fault(reason="a drafter broke")))
    bench.now_s = 200.0
    assert bench.handle(events.Tick()) == []
    assert bench.machine.snapshot()["counters"]["faults"] == 1


def test_a_draining_worker_gets_nothing_new_and_its_requests_move() -> None:
    bench = Bench("decode1", "decode2")
    bench.handle(submit(key="a"))
    bench.handle(verdict("decode1", 1, 8))
    ((_, dropped), (to, message)) = bench.handle(events.Drain("decode1"))
    assert (to, message.tokens) == ("decode2", (*PROMPT, 8))
    assert isinstance(dropped, Drop)
    assert [name for name, _ in bench.handle(submit(key="b"))] == ["decode2"]
    bench.free_all()
    assert (bench.open("decode1"), bench.open("decode2")) == (0, 2)


@pytest.mark.parametrize("drained", ["verify", "draft"])
def test_a_draining_helper_is_let_go_and_the_request_stays(drained: str) -> None:
    bench = reach(State.DRIVEN)
    assert kinds(bench.handle(events.Drain(drained))) == [(drained, "Drop")]
    bench.free_all()
    request = bench.machine.request(1)
    assert request is not None
    assert (bench.open(drained), request.state) == (0, State.DRIVEN)


def test_decode_workers_prefill_where_the_prefill_workers_drain() -> None:
    bench = Bench("prefill", "decode")
    bench.handle(events.Drain("prefill"))
    assert kinds(bench.handle(submit())) == [("decode", "Extend")]


def test_cached_tokens_are_those_of_the_prompt() -> None:
    """After a preemption the prefix cache holds output as well."""
    bench = Bench("decode")
    bench.handle(submit(max_tokens=3))
    bench.handle(says("decode", Verdict(request=1, epoch=0, task=1, outcomes=((-1, 8),), cached=2)))
    bench.handle(says("decode", Refused(request=1, epoch=2, reason="pages")))
    bench.handle(says("decode", Verdict(request=1, epoch=3, task=2, outcomes=((-1, 9),), cached=4)))
    last = bench.handle(cancel())[0][1]
    assert last.usage.cached_tokens == 3
