"""A desk and its messages: every opening ends once, every Extend is answered once, no page is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from distspec.muster import GRACE
from distspec.protocol.messages import (
    Drop,
    Extend,
    Freed,
    Lease,
    Progress,
    Refused,
    Revoke,
    Verdict,
    Withdraw,
)
from distspec.protocol.values import ROOT, Node, SamplingParams
from distspec.rounds import Desk
from tests.desks import (
    GREEDY,
    SHAPE,
    answer,
    desk,
    engine,
    extend,
    lease,
    model,
    next_token,
    plain,
    run,
    stream,
)

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)


def y(*text: int) -> int:
    return next_token(model(), text, GREEDY)


def then(start: int, tokens: Sequence[int] = (), nodes: Sequence[Node] = (), **more: object) -> Extend:
    fields: dict[str, Any] = {"epoch": 1, "task": 99, **more}
    return Extend(request=1, start=start, tokens=tuple(tokens), nodes=tuple(nodes), **fields)


def gone(of: Desk, request: int) -> bool:
    """The desk holds nothing of the request: going on with it gets no answer."""
    return of.receive(Extend(request=request, epoch=999, task=1, start=1, tokens=(1,))) == [] and not of.ready()


# -- outcomes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 3, 64])
def test_a_verdict_names_the_outcome_of_the_root_and_of_each_node(budget: int) -> None:
    tree = [Node(id=5, parent=ROOT, token=3), Node(id=7, parent=5, token=4), Node(id=6, parent=ROOT, token=9)]
    verdict = answer(desk(engine(4), budget=budget), extend(1, PROMPT, nodes=tuple(tree)))
    assert dict(verdict.outcomes) == {ROOT: y(*PROMPT), 5: y(*PROMPT, 3), 7: y(*PROMPT, 3, 4), 6: y(*PROMPT, 9)}
    assert len(verdict.outcomes) == 4


def test_nodes_live_on_until_they_are_committed_or_dropped() -> None:
    subject = desk(engine(4))
    tree = (Node(id=1, parent=ROOT, token=3), Node(id=2, parent=1, token=4), Node(id=3, parent=ROOT, token=9))
    answer(subject, extend(1, PROMPT, nodes=tree))
    below = answer(subject, then(10, nodes=[Node(id=4, parent=2, token=6)]))
    assert below.outcomes == ((4, y(*PROMPT, 3, 4, 6)),)
    kept = answer(subject, then(11, commit=(1,), drop=(3,), nodes=[Node(id=8, parent=ROOT, token=1)]))
    assert kept.outcomes == ((8, y(*PROMPT, 3, 1)),)
    fresh = answer(subject, then(12, [5], commit=(2,), drop=(4, 8)))
    assert fresh.outcomes == ((ROOT, y(*PROMPT, 3, 4, 5)),)


def test_cached_tokens_are_not_computed_again_and_are_counted() -> None:
    of = engine(4)
    subject = desk(of)
    first = answer(subject, extend(1, PROMPT))
    subject.receive(Drop(request=1, epoch=1))
    again = answer(subject, extend(2, PROMPT))
    assert (first.cached, again.cached) == (0, 8)
    assert again.outcomes == first.outcomes


def test_bookkeeping_alone_is_answered_at_once() -> None:
    subject = desk(engine(4))
    answer(subject, extend(1, PROMPT, nodes=(Node(id=1, parent=ROOT, token=3),)))
    [verdict] = subject.receive(then(10, drop=(1,)))
    assert isinstance(verdict, Verdict)
    assert verdict.outcomes == ()
    assert not subject.ready()


def test_messages_that_wait_are_handled_in_order() -> None:
    subject = desk(engine(4))
    messages: list[Extend | Lease | Revoke] = [
        extend(1, PROMPT, nodes=(Node(id=1, parent=ROOT, token=3),)),
        Extend(request=1, epoch=2, task=2, start=10, tokens=(4,), drop=(1,)),
        Lease(request=1, epoch=3, start=11, tokens=(5,), emitted=2),
        Revoke(request=1, epoch=4),
    ]
    assert [reply for message in messages for reply in subject.receive(message)] == []
    replies = [type(reply).__name__ for reply in run(subject)]
    assert replies == ["Verdict", "Verdict", "Revoked"]


def test_a_span_covers_all_steps_of_an_extend() -> None:
    verdict = answer(desk(engine(4), budget=4), extend(1, PROMPT))
    assert verdict.span[1] - verdict.span[0] == 5.0, "three steps, each read off a clock before and after"


def test_a_verdict_says_what_its_last_step_took() -> None:
    subject = desk(engine(4), budget=8)
    subject.receive(extend(1, PROMPT))
    subject.receive(extend(2, PROMPT[:3]))
    steps = {reply.request: reply.step for reply in run(subject) if isinstance(reply, Verdict)}
    assert steps == {1: (5, 1.0), 2: (5, 1.0)}, "two rows and three share the second step"
    assert answer_at_once(subject).step == (0, 0.0)


def answer_at_once(subject: Desk) -> Verdict:
    """The Verdict of an Extend that asks for nothing."""
    [verdict] = subject.receive(then(10))
    assert isinstance(verdict, Verdict)
    return verdict


def test_a_step_waits_for_a_request_that_was_just_answered_and_not_for_one_that_is_gone() -> None:
    """Each read of the clock takes a second while the desk steps, so any step takes one, and nothing else any time."""
    now_s, passes_s = [0.0], [0.0]

    def clock() -> float:
        now_s[0] += passes_s[0]
        return now_s[0]

    def work(*messages: Extend) -> None:
        for message in messages:
            subject.receive(message)
        passes_s[0] = 1.0
        run(subject)
        passes_s[0] = 0.0
        now_s[0] += 0.1  # until they come back

    subject = Desk(engine(4), None, max_num_batched_tokens=64, clock=clock)
    work(extend(1, PROMPT), extend(2, PROMPT))
    for start in (10, 11, 12):
        work(then(start, (4,)), replace(then(start, (4,)), request=2))
    subject.receive(then(13, (4,)))
    now_s[0] -= 0.05
    assert subject.hold_s() == pytest.approx(0.1 * (1 + GRACE) - 0.05)
    subject.receive(Drop(request=2, epoch=1))
    assert subject.hold_s() == 0


def test_long_prompts_and_running_streams_share_steps() -> None:
    subject = desk(engine(), budget=8)
    subject.receive(lease(1, (3,)))
    subject.step()
    subject.receive(extend(2, PROMPT * 5))
    replies = run(subject)
    verdict = next(i for i, reply in enumerate(replies) if isinstance(reply, Verdict))
    assert verdict >= 50 // 8, "each chunk of the prompt let the stream go on"
    assert all(isinstance(reply, Progress) for reply in replies[:verdict])


# -- withdrawal ------------------------------------------------------------------------------------


def withdraw(*tasks: int, epoch: int = 1) -> Withdraw:
    return Withdraw(request=1, epoch=epoch, tasks=tasks)


TREE = (Node(id=1, parent=ROOT, token=3), Node(id=2, parent=1, token=4), Node(id=3, parent=ROOT, token=9))


def test_nodes_that_were_withdrawn_are_not_computed_and_may_be_dropped_later() -> None:
    subject = desk(engine(4))
    subject.receive(extend(1, PROMPT, nodes=TREE))
    assert subject.receive(withdraw(1)) == []
    [verdict] = run(subject)
    assert isinstance(verdict, Verdict)
    assert verdict.outcomes == ((ROOT, y(*PROMPT)),)
    assert verdict.step[0] == len(PROMPT)
    fresh = answer(subject, then(10, [5], drop=(1, 2, 3), nodes=[Node(id=4, parent=ROOT, token=6)]))
    assert dict(fresh.outcomes) == {ROOT: y(*PROMPT, 5), 4: y(*PROMPT, 5, 6)}


def test_what_was_computed_before_it_was_withdrawn_is_answered_and_must_be_dropped() -> None:
    of = engine(4)
    subject = desk(of, budget=len(PROMPT) + 1)
    subject.receive(extend(1, PROMPT, nodes=TREE))
    assert subject.step() == []
    [verdict] = subject.receive(withdraw(1))
    assert isinstance(verdict, Verdict)
    assert dict(verdict.outcomes) == {ROOT: y(*PROMPT), 1: y(*PROMPT, 3)}
    assert not subject.ready()
    answer(subject, then(11, [5], commit=(1,), drop=(2, 3)))
    assert list(of.sequence(0).nodes) == []


def test_a_task_that_waits_loses_its_nodes_and_those_that_hang_on_them() -> None:
    subject = desk(engine(4))
    subject.receive(extend(1, PROMPT))
    subject.receive(then(10, nodes=TREE[:2], task=7))
    subject.receive(then(10, nodes=[Node(id=8, parent=2, token=5), Node(id=9, parent=ROOT, token=5)], task=8))
    assert subject.receive(withdraw(7)) == []
    outcomes = {reply.task: reply.outcomes for reply in run(subject) if isinstance(reply, Verdict)}
    assert outcomes == {1: ((ROOT, y(*PROMPT)),), 7: (), 8: ((9, y(*PROMPT, 5)),)}
    assert answer(subject, then(10, [5], drop=(1, 2, 8, 9))).outcomes == ((ROOT, y(*PROMPT, 5)),)


def test_a_withdrawal_of_what_is_over_says_nothing_and_changes_nothing() -> None:
    subject = desk(engine(4))
    assert subject.receive(withdraw(1)) == []
    answer(subject, extend(1, PROMPT, nodes=TREE))
    assert subject.receive(withdraw(1)) == subject.receive(withdraw(99)) == []
    kept = answer(subject, then(10, nodes=[Node(id=4, parent=2, token=6)]))
    assert kept.outcomes == ((4, y(*PROMPT, 3, 4, 6)),)
    subject.receive(then(10, nodes=[Node(id=5, parent=4, token=6)], epoch=3))
    assert subject.receive(withdraw(99, epoch=2)) == [], "of an epoch that is over"
    assert [reply.outcomes for reply in run(subject) if isinstance(reply, Verdict)] == [((5, y(*PROMPT, 3, 4, 6, 6)),)]


# -- disagreements -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        then(9, [1]),
        then(11, [1]),
        then(10, [1], commit=(4,)),
        then(10, [1], drop=(4,)),
        then(10, nodes=[Node(id=9, parent=4, token=1)]),
        then(10, [1], nodes=[Node(id=9, parent=1, token=1)]),
        then(10, nodes=[Node(id=1, parent=ROOT, token=1)]),
        then(10, nodes=[Node(id=9, parent=ROOT, token=1), Node(id=9, parent=ROOT, token=1)]),
        then(10, [1] * SHAPE.max_position),
        Lease(request=1, epoch=1, start=10, tokens=(1,)),
        Lease(request=1, epoch=1, start=11, tokens=(), commit=(1,)),
        Lease(
            request=1, epoch=1, start=10, tokens=(1,), drop=(1,), params=SamplingParams(max_tokens=SHAPE.max_position)
        ),
    ],
)
def test_a_disagreement_is_refused_and_frees_the_request(message: Extend | Lease) -> None:
    subject = desk(engine(4))
    answer(subject, extend(1, PROMPT, nodes=(Node(id=1, parent=ROOT, token=3),)))
    task = message.task if isinstance(message, Extend) else None
    assert [*subject.receive(message), *run(subject)] == [Refused(request=1, epoch=1, reason="state", task=task)]
    assert gone(subject, 1)


def test_nodes_of_a_root_that_is_past_bear_no_children() -> None:
    subject = desk(engine(4))
    tree = (Node(id=1, parent=ROOT, token=3), Node(id=2, parent=ROOT, token=4))
    answer(subject, extend(1, PROMPT, nodes=tree))
    answer(subject, then(11, commit=(1,)))
    assert subject.receive(then(11, nodes=[Node(id=3, parent=2, token=4)])) == []
    assert run(subject) == [Refused(request=1, epoch=1, reason="state", task=99)]


def test_a_leased_request_takes_no_extend() -> None:
    subject = desk(engine(4))
    subject.receive(lease(1, PROMPT))
    subject.step()
    assert subject.receive(then(10, [1])) == [Refused(request=1, epoch=1, reason="state", task=99)]
    assert gone(subject, 1)


def test_messages_of_a_past_epoch_say_nothing_and_change_nothing() -> None:
    subject = desk(engine(4))
    subject.receive(Extend(request=1, epoch=5, task=1, start=0, tokens=PROMPT, params=GREEDY))
    past: list[Drop | Revoke | Extend] = [Drop(request=1, epoch=4), Revoke(request=1, epoch=4), then(0, [1])]
    for stale in past:
        assert subject.receive(stale) == []
    assert [type(reply) for reply in run(subject)] == [Verdict]


def test_what_is_not_open_here_gets_no_answer() -> None:
    subject = desk(engine(4))
    messages: list[Drop | Revoke | Extend] = [Drop(request=1, epoch=1), Revoke(request=1, epoch=1), then(10, [1])]
    for message in messages:
        assert subject.receive(message) == []
    assert not subject.ready()


def test_an_opening_without_parameters_is_refused() -> None:
    message = Extend(request=1, epoch=1, task=4, start=0, tokens=PROMPT)
    assert desk(engine(4)).receive(message) == [Refused(request=1, epoch=1, reason="state", task=4)]


# -- want of slots and pages ---------------------------------------------------------------------------


def test_without_a_slot_a_request_is_refused_and_the_others_go_on() -> None:
    subject = desk(engine(4, slots=1))
    assert subject.receive(extend(1, PROMPT)) == []
    assert subject.receive(extend(2, PROMPT)) == [Refused(request=2, epoch=1, reason="slots", task=2)]
    assert [type(reply) for reply in run(subject)] == [Verdict]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_newest_gives_way_and_goes_on_elsewhere_with_the_same_tokens(page_size: int) -> None:
    params = SamplingParams(max_tokens=40, seed=9)
    tight, roomy = desk(engine(page_size, num_pages=64 // page_size)), desk(engine(page_size))
    prompts = {1: PROMPT, 2: (7, 7, 7), 3: (5,)}
    for request, prompt in prompts.items():
        assert tight.receive(lease(request, prompt, params)) == []
    replies = run(tight)
    refused = [reply for reply in replies if isinstance(reply, Refused)]
    assert [reply.request for reply in refused] == [3, 2], "newest first; the oldest is served"
    assert {reply.reason for reply in refused} == {"pages"}
    for request, prompt in prompts.items():
        tokens = stream(replies, request)
        if request > 1:
            assert len(tokens) < params.max_tokens
            moved = Lease(
                request=request, epoch=2, start=0, tokens=(*prompt, *tokens), emitted=len(tokens), params=params
            )
            assert roomy.receive(moved) == []
            tokens += [token for reply in run(roomy) if isinstance(reply, Progress) for token in reply.tokens]
        assert tokens == plain(prompt, params)


def test_a_tree_that_can_never_fit_is_refused_and_frees_everything() -> None:
    subject = desk(engine(4, num_pages=3))
    tree = tuple(Node(id=id, parent=ROOT, token=id) for id in range(3))
    assert subject.receive(extend(1, PROMPT, nodes=tree)) == []
    assert run(subject) == [Refused(request=1, epoch=1, reason="pages", task=1)]
    assert gone(subject, 1)


# -- drops and terms ---------------------------------------------------------------------------------


def test_a_drop_ends_what_runs_and_frees_at_once() -> None:
    subject = desk(engine(4), budget=4)
    subject.receive(extend(1, PROMPT))
    subject.step()
    assert subject.receive(Drop(request=1, epoch=1)) == [Freed(request=1, epoch=1)]
    assert gone(subject, 1)
    subject.check()


def test_a_new_term_forgets_everything() -> None:
    of = engine(4, slots=2)
    subject = desk(of)
    for _ in range(3):
        assert subject.receive(lease(1, PROMPT)) == subject.receive(extend(2, PROMPT)) == []
        subject.step()
        subject.reset()
        assert not subject.ready()
        subject.check()
