"""Tickets of a desk: what they reserve waits for them, what they brought is as good as computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from distspec.errors import TransferFailed
from distspec.protocol.messages import (
    Drop,
    Extend,
    Freed,
    Lease,
    Progress,
    Received,
    ReceiveKV,
    Refused,
    SendKV,
    TransferLost,
)
from distspec.protocol.values import SamplingParams
from tests.desks import SEEDED, answer, desk, engine, extend, lease, model, next_token, plain, run

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)


def receive(request: int, ticket: int, tokens: Sequence[int], params: SamplingParams = SEEDED) -> ReceiveKV:
    return ReceiveKV(
        request=request,
        epoch=1,
        ticket=ticket,
        peer="a",
        peer_incarnation=1,
        start=0,
        length=len(tokens),
        tokens=tuple(tokens),
        params=params,
    )


def send(request: int, ticket: int, length: int) -> SendKV:
    return SendKV(request=request, epoch=1, ticket=ticket, peer="b", peer_incarnation=1, start=0, length=length)


def _uncut() -> None:
    raise AssertionError("all of it was computed")


def test_a_drop_waits_for_the_ticket_that_reads_its_pages() -> None:
    subject = desk(engine(4, slots=1))
    answer(subject, extend(1, PROMPT))
    slot = subject.tickets.source(send(1, ticket=5, length=10), _uncut)
    assert slot == 0
    assert subject.receive(Drop(request=1, epoch=1)) == []
    [refused] = subject.receive(extend(2, PROMPT))
    assert isinstance(refused, Refused), "the slot is still taken"
    subject.tickets.sent(1, 5)
    assert subject.ready()
    assert subject.step() == [Freed(request=1, epoch=1)]
    assert subject.receive(extend(2, PROMPT)) == []


def test_what_is_not_held_cannot_be_sent() -> None:
    subject = desk(engine(4))
    with pytest.raises(TransferFailed):
        subject.tickets.source(send(1, ticket=5, length=10), _uncut)
    answer(subject, extend(1, PROMPT))
    with pytest.raises(TransferFailed):
        subject.tickets.source(send(1, ticket=5, length=11), _uncut)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_kv_that_was_received_is_as_good_as_computed(page_size: int) -> None:
    source, target = engine(page_size), engine(page_size)
    here, there = desk(source), desk(target)
    here.receive(extend(1, PROMPT, SEEDED))
    run(here)
    sender = here.tickets.source(send(1, ticket=5, length=10), _uncut)
    message = receive(1, 5, PROMPT)
    receiver = there.tickets.reserve(message)
    assert isinstance(receiver, int)
    first = next_token(model(), PROMPT, SEEDED)
    go_on = Lease(request=1, epoch=1, start=10, tokens=(first,), emitted=1)
    assert there.receive(go_on) == []
    assert not there.ready(), "nothing is computed upon KV that is not there"
    target.scatter(receiver, 0, source.gather(sender, 0, 10))
    here.tickets.sent(1, 5)
    reply = there.tickets.received(message)
    assert isinstance(reply, Received)
    tokens = [token for reply in run(there) if isinstance(reply, Progress) for token in reply.tokens]
    assert [first, *tokens] == plain(PROMPT, SEEDED)


def test_a_lost_ticket_frees_the_receiver_and_says_so_once() -> None:
    subject = desk(engine(4, slots=1))
    message = receive(1, 5, PROMPT)
    assert subject.tickets.reserve(message) == 0
    lost = subject.tickets.lost(message, "link")
    assert lost == TransferLost(request=1, epoch=1, ticket=5, reason="link", freed=True)
    assert not subject.ready()
    assert subject.tickets.reserve(message) == 0
    assert subject.receive(Drop(request=1, epoch=1)) == []
    assert subject.tickets.lost(message, "link") == TransferLost(
        request=1, epoch=1, ticket=5, reason="link", freed=False
    )
    assert subject.step() == [Freed(request=1, epoch=1)]
    subject.check()


def test_reserved_pages_wait_for_their_ticket_even_over_a_new_term() -> None:
    subject = desk(engine(4, slots=1))
    message = receive(1, 5, PROMPT)
    assert subject.tickets.reserve(message) == 0
    subject.reset()
    [refused] = subject.receive(extend(2, PROMPT))
    assert isinstance(refused, Refused)
    subject.tickets.lost(message, "reset")
    assert not subject.ready(), "nobody of the new term waits for a Freed"
    assert subject.receive(extend(2, PROMPT)) == []


def test_a_receiver_without_slots_or_pages_refuses() -> None:
    full = desk(engine(4, slots=1))
    full.receive(extend(2, PROMPT))
    assert full.tickets.reserve(receive(1, 5, PROMPT)) == Refused(request=1, epoch=1, reason="slots")
    small = desk(engine(4, num_pages=2))
    assert small.tickets.reserve(receive(1, 5, PROMPT)) == Refused(request=1, epoch=1, reason="pages")
    assert not small.ready()
    small.check()


@pytest.mark.parametrize("first", [extend(1, PROMPT), lease(1, PROMPT)], ids=["length", "lease"])
def test_a_ticket_that_disagrees_is_lost_and_frees_the_request(first: Extend | Lease) -> None:
    subject = desk(engine(4))
    subject.receive(first)
    subject.step()
    message = replace(receive(1, 5, PROMPT), start=4, length=6)
    freed = TransferLost(request=1, epoch=1, ticket=5, reason="state", freed=True)
    assert subject.tickets.reserve(message) == freed
    assert subject.tickets.reserve(message) == replace(freed, freed=False), "nothing is there any more"
    assert run(subject) == []
    subject.check()


def test_a_ticket_of_a_past_epoch_is_lost_and_changes_nothing() -> None:
    subject = desk(engine(4))
    answer(subject, extend(1, PROMPT))
    answer(subject, then := Extend(request=1, epoch=4, task=2, start=10, tokens=(3,)))
    lost = TransferLost(request=1, epoch=1, ticket=5, reason="state", freed=False)
    assert subject.tickets.reserve(replace(receive(1, 5, PROMPT), start=11)) == lost
    answer(subject, replace(then, task=3, start=11))


def test_requests_with_a_ticket_are_not_given_up_for_pages() -> None:
    subject = desk(engine(4, num_pages=6))
    assert subject.receive(extend(1, PROMPT)) == []
    run(subject)
    assert isinstance(subject.tickets.reserve(receive(2, 5, PROMPT[:4])), int)
    subject.tickets.source(send(1, ticket=6, length=10), _uncut)
    subject.receive(extend(3, PROMPT[::-1]))
    assert run(subject) == [Refused(request=3, epoch=1, reason="pages", task=3)]
    subject.tickets.sent(1, 6)
    assert isinstance(subject.tickets.received(receive(2, 5, PROMPT[:4])), Received)


def test_a_newer_request_with_a_ticket_is_passed_over_when_pages_are_short() -> None:
    subject = desk(engine(4, num_pages=6), budget=4)
    subject.receive(lease(1, PROMPT[:4], SamplingParams(max_tokens=12, seed=1)))
    subject.step()
    message = receive(2, 5, PROMPT)
    assert isinstance(subject.tickets.reserve(message), int)
    replies = run(subject)
    assert [reply for reply in replies if isinstance(reply, Refused)] == [
        Refused(request=1, epoch=1, reason="pages", task=None)
    ]
    assert isinstance(subject.tickets.received(message), Received)
