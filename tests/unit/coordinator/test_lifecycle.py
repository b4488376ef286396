"""The way of one request, event by event: prefill, transfer, lease, revoke, and what goes wrong on it."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from distspec.coordinator import events, lifecycle
from distspec.protocol.messages import (
    Draft,
    Drop,
    Extend,
    Freed,
    Lease,
    Output,
    Progress,
    Received,
    ReceiveKV,
    Refused,
    Revoke,
    Revoked,
    SendKV,
    TransferLost,
)
from distspec.protocol.values import Constraint, Shape
from tests.machines import PROMPT, Bench, drafted, kinds, left, output, params, says, submit, verdict


def progress(start: int, *tokens: int, epoch: int = 2, request: int = 1, worker: str = "decode") -> events.FromWorker:
    message = Progress(request=request, epoch=epoch, start=start, tokens=tokens, drafted=(0,), accepted=(0,))
    return says(worker, message)


def extend(task: int, start: int, *tokens: int, epoch: int = 0, request: int = 1) -> Extend:
    opening = params() if start == 0 else None
    return Extend(request=request, epoch=epoch, task=task, start=start, tokens=tokens, params=opening)


def lease(start: int, *tokens: int, epoch: int, emitted: int) -> Lease:
    return Lease(request=1, epoch=epoch, start=start, tokens=tokens, emitted=emitted, params=params())


def receive(ticket: int, *tokens: int, epoch: int, source: str) -> ReceiveKV:
    return ReceiveKV(
        request=1,
        epoch=epoch,
        ticket=ticket,
        peer=source,
        peer_incarnation=1,
        start=0,
        length=len(tokens),
        tokens=tokens,
        params=params(),
    )


def send(ticket: int, length: int, *, epoch: int, to: str) -> SendKV:
    return SendKV(request=1, epoch=epoch, ticket=ticket, peer=to, peer_incarnation=1, start=0, length=length)


def drop(epoch: int) -> Drop:
    return Drop(request=1, epoch=epoch)


def test_a_plain_request_is_prefilled_leased_and_finished() -> None:
    bench = Bench("decode")
    bench.play(
        [
            (submit(), [("decode", extend(1, 0, *PROMPT))]),
            (verdict("decode", 1, 8), [output(0, 8), ("decode", lease(3, 8, epoch=2, emitted=1))]),
            (progress(1, 9, 10), [output(1, 9, 10)]),
        ]
    )
    ended = bench.handle(progress(3, 1, 2, 3, 4, 5, 6, 7))
    assert kinds(ended) == [("c", "Output"), ("decode", "Drop")]
    assert ended[0][1].tokens == (1, 2, 3, 4, 5, 6, 7)
    assert ended[0][1].finish_reason == "length"
    bench.free_all()
    assert bench.open("decode") == 0
    assert bench.machine.snapshot()["requests"] == {}


@pytest.mark.parametrize("first", ["outcome", "kv"])
def test_kv_goes_from_the_prefill_worker_home_while_it_is_computed(first: str) -> None:
    """Decoding begins when both the outcome and the KV are there, whichever comes last."""
    bench = Bench("prefill", "decode")
    moving = [
        ("prefill", extend(1, 0, *PROMPT)),
        ("decode", receive(2, *PROMPT, epoch=0, source="prefill")),
        ("prefill", send(2, 3, epoch=0, to="decode")),
    ]
    begins = [("prefill", drop(epoch=1)), ("decode", lease(3, 8, epoch=2, emitted=1))]
    arrived = says("decode", Received(request=1, epoch=0, ticket=2))
    bench.play([(submit(), moving)])
    if first == "outcome":
        bench.play([(verdict("prefill", 1, 8), [output(0, 8)]), (arrived, begins)])
    else:
        bench.play([(arrived, []), (verdict("prefill", 1, 8), [output(0, 8), *begins])])
    bench.play([(says("prefill", Freed(request=1, epoch=1)), [])])
    assert (bench.open("prefill"), bench.open("decode")) == (0, 1)


def test_a_request_of_one_token_leaves_nothing_on_either_end() -> None:
    bench = Bench("prefill", "decode")
    bench.handle(submit(max_tokens=1))
    ended = kinds(bench.handle(verdict("prefill", 1, 8)))
    assert sorted(ended) == [("c", "Output"), ("decode", "Drop"), ("prefill", "Drop")]
    bench.free_all()
    assert (bench.open("prefill"), bench.open("decode")) == (0, 0)


def test_kv_that_is_lost_before_the_outcome_is_computed_at_home() -> None:
    bench = Bench("prefill", "decode")
    bench.handle(submit())
    lost = TransferLost(request=1, epoch=0, ticket=2, reason="link", freed=True)
    assert kinds(bench.handle(says("decode", lost))) == [("prefill", "Drop"), ("decode", "Extend")]
    bench.free_all()
    assert (bench.open("prefill"), bench.open("decode")) == (0, 1)


def test_where_a_prefill_worker_dies_another_one_prefills() -> None:
    bench = Bench("prefill1", "prefill2", "decode")
    bench.handle(submit())
    again = bench.handle(left("prefill1"))
    assert kinds(again) == [
        ("decode", "Drop"),
        ("prefill2", "Extend"),
        ("decode", "ReceiveKV"),
        ("prefill2", "SendKV"),
    ]


def test_a_driven_request_leaves_the_prefill_worker_too() -> None:
    bench = Bench("prefill", "decode", "draft")
    bench.handle(submit(policy="sd"))
    bench.handle(verdict("prefill", 1, 8))
    commands = kinds(bench.handle(says("decode", Received(request=1, epoch=1, ticket=2))))
    assert commands == [("prefill", "Drop"), ("draft", "Draft")]


def test_a_drafter_that_was_never_asked_costs_no_credit() -> None:
    """Of two tokens one comes from the prefill and one from the root: there is nothing to draft."""
    bench = Bench("decode", "draft")
    bench.handle(submit(policy="sd", max_tokens=2))
    bench.handle(verdict("decode", 1, 8))
    assert bench.open("draft") == 1
    assert kinds(bench.handle(verdict("decode", 2, 9))) == [("c", "Output"), ("decode", "Drop")]
    assert bench.open("draft") == 0


def test_a_lease_is_revoked_when_a_drafter_comes_late() -> None:
    """sd without a drafter is leased; with one it is driven, from what the home worker has computed."""
    bench = Bench("decode")
    bench.handle(submit(policy="sd"))
    bench.handle(verdict("decode", 1, 8))
    assert bench.join("draft") == []
    bench.play(
        [
            (events.Tick(), [("decode", Revoke(request=1, epoch=2))]),
            (progress(1, 9), [output(1, 9)]),
            (
                says("decode", Revoked(request=1, epoch=2, length=2, computed=4)),
                [
                    (
                        "draft",
                        Draft(
                            request=1,
                            epoch=2,
                            task=2,
                            keep=0,
                            tokens=(*PROMPT, 8, 9),
                            shape=Shape(steps=2, depth=7),
                            params=params(),
                        ),
                    )
                ],
            ),
        ]
    )


def test_a_request_leased_again_goes_on_from_what_was_computed() -> None:
    """The drafter leaves before the revocation is through."""
    bench = Bench("decode", "draft")
    bench.handle(submit(policy="sd"))
    bench.handle(left("draft"))
    bench.handle(verdict("decode", 1, 8))
    bench.join("draft", 2)
    bench.handle(events.Tick())
    bench.handle(left("draft", 2))
    bench.play(
        [
            (
                says("decode", Revoked(request=1, epoch=2, length=1, computed=3)),
                [("decode", lease(3, 8, epoch=3, emitted=1))],
            )
        ]
    )


def test_a_stream_that_ends_while_it_is_revoked_ends_once() -> None:
    bench = Bench("decode")
    bench.handle(submit(policy="sd", max_tokens=2))
    bench.handle(verdict("decode", 1, 8))
    bench.join("draft")
    bench.handle(events.Tick())
    assert kinds(bench.handle(progress(1, 9))) == [("c", "Output"), ("decode", "Drop")]
    assert bench.handle(says("decode", Revoked(request=1, epoch=2, length=2, computed=4))) == []


@pytest.mark.parametrize("start", [0, 2])
def test_a_gap_or_a_repeat_in_a_lease_is_a_fault_of_the_worker(start: int) -> None:
    bench = Bench("decode")
    bench.handle(submit())
    bench.handle(verdict("decode", 1, 8))
    assert bench.handle(progress(start, 9)) == [("decode", "suspect")]
    assert bench.machine.request(1) is not None
    assert bench.machine.request(1).tokens == [*PROMPT, 8]  # type: ignore[union-attr]


def test_a_lease_that_ends_at_another_length_is_a_fault_of_the_worker() -> None:
    bench = Bench("decode")
    bench.handle(submit(policy="sd"))
    bench.handle(verdict("decode", 1, 8))
    bench.join("draft")
    bench.handle(events.Tick())
    assert bench.handle(says("decode", Revoked(request=1, epoch=2, length=3, computed=5))) == [("decode", "suspect")]


def test_what_a_dead_worker_held_is_prefilled_elsewhere_with_its_tokens() -> None:
    bench = Bench("decode1", "decode2")
    bench.handle(submit())
    bench.handle(verdict("decode1", 1, 8))
    bench.handle(progress(1, 9, worker="decode1"))
    bench.play(
        [
            (left("decode1"), [("decode2", extend(2, 0, *PROMPT, 8, 9, epoch=3))]),
            (verdict("decode2", 2, 10), [output(2, 10), ("decode2", lease(5, 10, epoch=5, emitted=3))]),
        ]
    )


@pytest.mark.parametrize("dead", ["prefill", "decode"])
def test_either_end_of_a_transfer_may_die(dead: str) -> None:
    bench = Bench("prefill", "decode")
    bench.handle(submit())
    bench.handle(verdict("prefill", 1, 8))
    other = {"prefill": "decode", "decode": "prefill"}[dead]
    assert kinds(bench.handle(left(dead)))[0] == (other, "Drop")
    bench.free_all()
    again = bench.join(dead, 2)
    if dead == "decode":
        assert kinds(again) == [("prefill", "Extend"), ("decode", "ReceiveKV"), ("prefill", "SendKV")]
        assert again[0][1].tokens == (*PROMPT, 8)
    assert bench.open("decode") == 1


@pytest.mark.parametrize("freed", [True, False])
def test_a_lost_transfer_starts_over_and_returns_one_credit(freed: bool) -> None:
    """The receiver says that nothing is left, or the sender that it failed; then no link is needed any more."""
    bench = Bench("prefill", "decode")
    bench.handle(submit())
    bench.handle(verdict("prefill", 1, 8))
    side = "decode" if freed else "prefill"
    lost = TransferLost(request=1, epoch=1, ticket=2, reason="link", freed=freed)
    commands = kinds(bench.handle(says(side, lost)))
    drops = [("prefill", "Drop")] if freed else [("decode", "Drop"), ("prefill", "Drop")]
    assert commands == [*drops, ("decode", "Extend")]
    bench.free_all()
    assert (bench.open("prefill"), bench.open("decode")) == (0, 1)


def test_preempted_requests_go_before_those_that_wait() -> None:
    bench = Bench()
    bench.join("decode", slots=1)
    bench.handle(submit(key="a"))
    bench.handle(verdict("decode", 1, 8))
    assert bench.handle(submit(key="b")) == []
    bench.play(
        [
            (
                says("decode", Refused(request=1, epoch=2, reason="pages")),
                [("decode", extend(2, 0, *PROMPT, 8, epoch=3))],
            )
        ]
    )


@pytest.mark.parametrize("workers", [("decode",), ("prefill", "decode"), ("decode", "decode-2")])
def test_a_constraint_that_a_worker_cannot_compile_ends_its_request_at_once(workers: tuple[str, ...]) -> None:
    """Another worker could not either, so nobody is asked again; the error says what is at fault."""
    bench = Bench(*workers)
    asked = bench.handle(submit(constraint=Constraint(kind="regex", text="a{9999}")))
    ended = bench.handle(says(asked[0][0], Refused(request=1, epoch=0, reason="constraint")))
    [error] = [message.error for _, message in ended if isinstance(message, Output)]
    assert error is not None
    assert (error[0], error[2]) == ("invalid_request", "constraint")
    assert "regex" in error[1]
    assert not [message for _, message in ended if isinstance(message, Extend)]
    bench.free_all()
    assert not any(bench.open(worker) for worker in workers)
    assert bench.machine.snapshot()["requests"] == {}


def test_a_request_that_never_gets_room_ends_in_an_error() -> None:
    bench = Bench("decode")
    bench.handle(submit())
    for i in range(lifecycle.MAX_REFUSALS):
        assert kinds(bench.handle(says("decode", Refused(request=1, epoch=i, reason="pages")))) == [
            ("decode", "Extend")
        ]
    last = bench.handle(says("decode", Refused(request=1, epoch=lifecycle.MAX_REFUSALS, reason="pages")))
    assert [message.error[0] for _, message in last] == ["unavailable"]
    assert bench.open("decode") == 0


def test_a_request_that_gains_a_token_each_time_is_never_given_up() -> None:
    bench = Bench("decode")
    bench.handle(submit(max_tokens=90, policy="ar"))
    for i in range(80):
        request = bench.machine.request(1)
        assert request is not None
        (task,) = request.tasks
        bench.handle(verdict("decode", task, i % 50))
        for _ in range(2):
            commands = bench.handle(says("decode", Refused(request=1, epoch=request.epoch, reason="pages")))
            assert kinds(commands) == [("decode", "Extend")]


def test_a_resubmitted_stream_goes_on_behind_its_tokens() -> None:
    bench = Bench("decode")
    bench.play(
        [
            (submit(emitted=(8, 9)), [("decode", extend(1, 0, *PROMPT, 8, 9))]),
            (verdict("decode", 1, 10), [output(2, 10), ("decode", lease(5, 10, epoch=2, emitted=3))]),
        ]
    )


@pytest.mark.parametrize(
    ("emitted", "reason"),
    [((8, 9), "length"), ((8, 4), "stop")],
)
def test_a_stream_resubmitted_whole_gets_the_terminal_message_that_it_lacks(
    emitted: tuple[int, ...], reason: str
) -> None:
    bench = Bench()
    ((client, message),) = bench.handle(submit(emitted=emitted, max_tokens=2, stop_token_ids=(4,)))
    assert (client, message.start, message.tokens, message.finish_reason) == ("c", 2, (), reason)
    assert bench.machine.snapshot()["queued"] == 0


def test_what_is_sent_is_what_the_source_holds_whatever_it_is_busy_with() -> None:
    """While home computes token 8 and two nodes, its KV is sent up to what it held before."""
    bench = Bench("decode", "draft")
    bench.handle(submit(policy="sd"))
    bench.handle(verdict("decode", 1, 8))
    draft = bench.sent[-1][1]
    assert isinstance(draft, Draft)
    request = bench.machine.request(1)
    assert request is not None
    assert kinds(bench.handle(drafted(draft.task, 9, 10))) == [("decode", "Extend")]
    assert request.holds["decode"].computed == 4
    bench.join("verify")
    bench.play(
        [
            (
                events.Tick(),
                [
                    ("verify", receive(4, *PROMPT, epoch=1, source="decode")),
                    ("decode", send(4, 3, epoch=1, to="verify")),
                ],
            )
        ]
    )


def test_a_refusal_that_crosses_a_drop_and_a_new_opening_returns_one_credit_and_harms_nothing() -> None:
    bench = Bench("decode", "verify", "draft")
    bench.handle(submit(policy="sd"))
    assert ("verify", "ReceiveKV") in kinds(bench.handle(verdict("decode", 1, 8)))
    assert kinds(bench.handle(left("draft"))) == [("verify", "Drop"), ("decode", "Lease")]
    late = Refused(request=1, epoch=1, reason="pages")  # on its way before the Drop arrives: no Freed will come
    bench.join("draft", 2)
    ((_, revoke),) = bench.handle(events.Tick())
    again = bench.handle(says("decode", Revoked(request=1, epoch=revoke.epoch, length=1, computed=3)))
    assert kinds(again)[:2] == [("verify", "ReceiveKV"), ("decode", "SendKV")]
    assert bench.open("verify") == 2
    request = bench.machine.request(1)
    assert request is not None
    before = astuple(request.holds["verify"])
    assert bench.handle(says("verify", late)) == []
    assert bench.open("verify") == 1
    assert astuple(request.holds["verify"]) == before
    assert bench.handle(says("verify", Refused(request=1, epoch=request.epoch, reason="pages"))) == []
    assert bench.open("verify") == 0
    assert "verify" not in request.holds
