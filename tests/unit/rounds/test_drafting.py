"""Draft messages: what the drafter is told, what comes back, and what happens when they overtake each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
from msgspec import structs

from distspec.drafters.base import Drafter, DraftRow, Proposal
from distspec.protocol.messages import (
    Draft,
    Drafted,
    Drop,
    Fault,
    Freed,
    Lease,
    Progress,
    Refused,
    Revoke,
    Revoked,
    Verdict,
)
from distspec.protocol.values import Shape
from distspec.rounds import DraftDesk
from tests.desks import GREEDY, Guess, Ticks, chain, desk, engine, extend, ngram, oracle, plain, run

TWO = Shape(steps=2)


def message(
    request: int, task: int, keep: int, tokens: Sequence[int], epoch: int = 1, shape: Shape = TWO, params: bool = True
) -> Draft:
    given = GREEDY if params and not keep else None
    return Draft(request=request, epoch=epoch, task=task, keep=keep, tokens=tuple(tokens), shape=shape, params=given)


class Told(Guess):
    """Proposes the length and last token of each text, so that replies show what the drafter was told."""

    def __init__(self) -> None:
        super().__init__(lambda row, text: Proposal.chain([len(text), text[-1]]))
        self.calls: list[int] = []

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.calls.append(len(rows))
        return super().propose(rows)


class Broken(Told):
    """Breaks on its second call, and has then lost what it knew."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        out = super().propose(rows)
        if len(self.calls) == 2:
            raise RuntimeError("out of luck")
        return out


def drafted(replies: Sequence[object]) -> dict[int, tuple[int, ...]]:
    return {reply.task: reply.tokens for reply in replies if isinstance(reply, Drafted)}


def test_all_that_wait_are_proposed_for_at_once() -> None:
    drafter = Told()
    subject = DraftDesk(drafter, Ticks())
    assert not subject.ready()
    for request in (1, 2, 3):
        assert subject.receive(message(request, 10 + request, 0, [5] * request)) == []
    assert subject.ready()
    replies = subject.step()
    assert drafted(replies) == {11: (1, 5), 12: (2, 5), 13: (3, 5)}
    assert {reply.span for reply in replies if isinstance(reply, Drafted)} == {(1.0, 2.0)}
    assert drafter.calls == [3]
    assert not subject.ready()


def test_a_draft_that_is_overtaken_still_changes_the_text_but_gets_no_answer() -> None:
    subject = DraftDesk(Told(), Ticks())
    subject.receive(message(1, 11, 0, [1, 2, 3]))
    subject.receive(message(1, 12, 2, [9, 8]))
    assert drafted(subject.step()) == {12: (4, 8)}
    subject.receive(message(1, 13, 4, [7]))
    subject.receive(message(1, 14, 5, []))
    assert drafted(subject.step()) == {14: (5, 7)}


@pytest.mark.parametrize("seed", range(20))
def test_the_drafter_holds_the_text_that_the_messages_spell(seed: int) -> None:
    """Cuts and growth of several texts in any order, some overtaken: each answer is for the text as it is."""
    random = Random(seed)
    subject = DraftDesk(Told(), Ticks())
    texts: dict[int, list[int]] = {}
    tasks: dict[int, int] = {}
    for task in range(60):
        request = random.randrange(3)
        text = texts.setdefault(request, [])
        keep = random.randint(0, len(text))
        text[keep:] = [random.randrange(11) for _ in range(random.randint(0 if keep else 1, 4))]
        subject.receive(message(request, task, keep, text[keep:]))
        tasks[request] = task
        if random.random() < 0.4:
            assert drafted(subject.step()) == {tasks[r]: (len(texts[r]), texts[r][-1]) for r in tasks}
            tasks.clear()


def test_a_drafter_that_breaks_costs_its_drafts_and_is_told_everything_again() -> None:
    subject = DraftDesk(Broken(), Ticks())
    subject.receive(message(1, 11, 0, [1, 2, 3]))
    subject.step()
    subject.receive(message(1, 12, 3, [4]))
    fault, reply = subject.step()
    assert isinstance(fault, Fault)
    assert "out of luck" in fault.reason
    assert isinstance(reply, Drafted)
    assert (reply.task, reply.tokens) == (12, ())
    subject.receive(message(1, 13, 4, [5]))
    assert drafted(subject.step()) == {13: (5, 5)}


def test_a_text_that_is_not_as_the_message_has_it_is_refused_once() -> None:
    subject = DraftDesk(Told(), Ticks())
    subject.receive(message(1, 11, 0, [1, 2, 3]))
    assert subject.receive(message(1, 12, 4, [1])) == [Refused(request=1, epoch=1, reason="state", task=12)]
    assert subject.receive(message(1, 13, 5, [1])) == []
    assert subject.receive(Drop(request=1, epoch=1)) == []
    assert not subject.ready()


def test_a_dropped_text_is_freed_once_and_its_drafts_are_not_made() -> None:
    subject = DraftDesk(Told(), Ticks())
    subject.receive(message(1, 11, 0, [1]))
    assert subject.receive(Drop(request=1, epoch=2)) == [Freed(request=1, epoch=2)]
    assert subject.receive(Drop(request=1, epoch=2)) == []
    assert not subject.ready()
    subject.receive(message(1, 12, 0, [1]))
    subject.reset()
    assert not subject.ready()


# -- slices and the fallback ---------------------------------------------------------------------------


class Grows(Guess):
    """Proposes as many sevens as levels were grown, and remembers the calls: {request: steps}."""

    def __init__(self, token: int = 7) -> None:
        super().__init__(lambda row, text: Proposal.chain([token] * row.shape.steps))
        self.calls: list[dict[int, int]] = []

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.calls.append({row.request: row.shape.steps for row in rows})
        return super().propose(rows)


def test_a_draft_that_arrives_meanwhile_joins_in_and_all_get_what_they_asked_for() -> None:
    drafter = Grows()
    subject = DraftDesk(drafter, Ticks())
    subject.receive(message(1, 11, 0, [1, 2], shape=Shape(steps=5)))
    subject.receive(message(2, 12, 0, [1], shape=Shape(steps=2)))
    first = subject.step()
    assert drafted(first) == {12: (7,) * 2}
    subject.receive(message(3, 13, 0, [1], shape=Shape(steps=1)))
    assert drafted(subject.step()) == {13: (7,)}
    [last] = subject.step()
    assert isinstance(last, Drafted)
    assert (last.task, last.tokens, last.base) == (11, (7,) * 5, 2)
    assert last.span == (1.0, 6.0), "from the first of its three slices to the last"
    assert last.step == (1, 0.5), "one row; two forwards took a second"
    assert drafter.calls == [{1: 2, 2: 2}, {1: 1, 3: 1}, {1: 2}]
    assert not subject.ready()


def test_a_newer_draft_takes_the_place_of_one_that_is_half_done() -> None:
    drafter = Grows()
    subject = DraftDesk(drafter, Ticks())
    subject.receive(message(1, 11, 0, [1, 2], shape=Shape(steps=5)))
    subject.receive(message(2, 12, 0, [1], shape=Shape(steps=2)))
    subject.step()
    subject.receive(message(1, 14, 2, [7], shape=Shape(steps=1)))
    assert drafted(subject.step()) == {14: (7,)}
    assert not subject.ready()


class Interrupted(Grows):
    """Grows a level of each tree in a call, as one that is called away after each forward."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        ones = [replace(row, shape=structs.replace(row.shape, steps=1)) for row in rows]
        lefts = [row.shape.steps - 1 for row in rows]
        return [
            Proposal((), (), left=left) if left else whole
            for left, whole in zip(lefts, super().propose(ones), strict=True)
        ]


def test_a_draft_of_a_drafter_that_is_called_away_goes_on_until_it_is_whole_or_overtaken() -> None:
    drafter = Interrupted()
    subject = DraftDesk(drafter, Ticks())
    subject.receive(message(1, 11, 0, [1, 2], shape=Shape(steps=3)))
    assert subject.step() == []
    subject.receive(message(2, 12, 0, [1], shape=Shape(steps=2)))
    assert subject.step() == []
    replies = subject.step()
    assert drafted(replies) == {11: (7,) * 3, 12: (7,) * 2}
    assert [reply.span for reply in replies if isinstance(reply, Drafted)] == [(1.0, 6.0), (3.0, 6.0)]
    assert not subject.ready()
    subject.receive(message(1, 13, 2, [3], shape=Shape(steps=5)))
    assert subject.step() == []
    subject.receive(message(1, 14, 3, [4], shape=Shape(steps=1)))
    assert drafted(subject.step()) == {14: (7,)}
    assert not subject.ready()


def test_the_fallback_answers_at_once_and_each_drafter_hears_the_whole_text() -> None:
    slow, quick = Grows(7), Grows(9)
    subject = DraftDesk(slow, Ticks(), quick)
    subject.receive(message(1, 11, 0, [1, 2, 3], shape=Shape(steps=3)))
    subject.receive(message(2, 12, 0, [1], shape=Shape(steps=1)))
    subject.step()
    subject.receive(message(1, 13, 3, [4], shape=Shape(steps=2, quick=True)))
    subject.receive(message(2, 14, 1, [4], shape=Shape(steps=4)))
    assert drafted(subject.step()) == {13: (9, 9), 14: (7,) * 4}
    subject.receive(message(1, 15, 4, [5], shape=Shape(steps=1)))
    assert drafted(subject.step()) == {15: (7,)}
    assert slow._texts[1] == (1, 2, 3, 4, 5)
    assert quick._texts[1] == (1, 2, 3, 4)
    assert subject.receive(Drop(request=1, epoch=1)) == [Freed(request=1, epoch=1)]
    assert not quick._texts
    assert list(slow._texts) == [2]


def test_without_a_fallback_the_drafter_itself_answers() -> None:
    drafter = Grows()
    subject = DraftDesk(drafter, Ticks())
    subject.receive(message(1, 11, 0, [1], shape=Shape(steps=2, quick=True)))
    assert drafted(subject.step()) == {11: (7, 7)}


# -- inside a target worker --------------------------------------------------------------------------


def test_a_target_worker_drafts_for_a_request_while_it_judges() -> None:
    subject = desk(engine(), Told())
    subject.receive(extend(1, (1, 2, 3)))
    subject.receive(message(1, 11, 0, [1, 2, 3]))
    replies = subject.step()
    assert drafted(replies) == {11: (3, 3)}
    assert any(isinstance(reply, Verdict) for reply in replies)


def test_drafts_of_a_request_that_is_not_open_get_no_answer() -> None:
    subject = desk(engine(), Told())
    assert subject.receive(message(1, 11, 0, [1, 2, 3])) == []
    assert not subject.ready()
    subject.receive(extend(1, (1, 2, 3)))
    subject.receive(message(1, 12, 0, [1, 2, 3]))
    assert subject.receive(Drop(request=1, epoch=1)) == [Freed(request=1, epoch=1)]
    assert subject.receive(message(1, 13, 3, [4])) == []
    assert not subject.ready()


def test_a_draft_that_nobody_can_make_gives_the_request_up() -> None:
    for drafter in (None, Told()):
        subject = desk(engine(), drafter)
        subject.receive(extend(1, (1, 2, 3)))
        [refused] = subject.receive(message(1, 11, 2, [3]))
        assert refused == Refused(request=1, epoch=1, reason="state", task=11)
        assert not subject.ready()
        subject.check()


@pytest.mark.parametrize("make", [ngram, lambda: Guess(oracle)])
def test_leases_and_drafts_of_one_request_may_take_turns(make: Callable[[], Drafter]) -> None:
    """Both use the drafter's one sequence of the request: each goes on as if the other had not been there."""
    prompt, subject = [1, 2, 3, 1, 2, 3], desk(engine(), make())
    right = plain(prompt, GREEDY)

    def lease(epoch: int, start: int, emitted: int) -> Lease:
        tokens = tuple((prompt + right)[start : len(prompt) + emitted])
        return Lease(request=1, epoch=epoch, start=start, tokens=tokens, emitted=emitted, **chain(2))

    subject.receive(extend(1, prompt))
    subject.receive(message(1, 11, 0, [*prompt, right[0]]))
    assert drafted(run(subject)).keys() == {11}
    subject.receive(lease(2, 6, 1))
    assert all(isinstance(reply, Progress) for _ in range(3) for reply in subject.step())
    [revoked] = [r for r in subject.receive(Revoke(request=1, epoch=2)) if isinstance(r, Revoked)]
    text = prompt + right[: revoked.length]
    subject.receive(message(1, 12, 7, text[7:], epoch=3))
    fresh = desk(engine(), make())
    fresh.receive(extend(1, prompt))
    fresh.receive(message(1, 12, 0, text))
    assert drafted(run(subject)) == drafted(run(fresh))
    subject.receive(lease(4, revoked.computed, revoked.length))
    rest = [token for reply in run(subject) if isinstance(reply, Progress) for token in reply.tokens]
    assert text + rest == prompt + right
