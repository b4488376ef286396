"""Features on their way to a draft worker: what a draft waits for is what it gets, whatever is lost, cut or late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from distspec.drafters.base import DraftRow, Proposal
from distspec.errors import IllegalTransition
from distspec.protocol.messages import Draft, Drafted, Drop, Fault, Freed, Refused, TransferLost
from distspec.protocol.values import FeatureTicket, Shape
from distspec.rounds.arrivals import Arrivals
from distspec.rounds.drafting import DraftDesk
from distspec.transfer.base import End, Outgoing, pieces
from tests.desks import CPU, GREEDY, Guess, Ticks
from tests.wire import Port, Wire

WIDTH = 3


def right(request: int, positions: range) -> Tensor:
    """Features that say whose they are: [positions, WIDTH]."""
    return torch.tensor([[request, position, -position] for position in positions], dtype=torch.float32).view(-1, WIDTH)


class Bench:
    """A draft worker's end and two targets on a wire; `said` is what tickets that ended made it say."""

    def __init__(self, seed: int = 0) -> None:
        self.wire = Wire(Random(seed))
        self.port = Port(self.wire, End("draft", 1))
        self.targets = {name: Port(self.wire, End(name, 1)) for name in ("a", "b")}
        self.said: list[TransferLost] = []
        self.arrivals = Arrivals(self.port, self._later, width=WIDTH, dtype=torch.float32, device=CPU)
        self.tickets = 0

    def _later(self, action: Callable[[], Sequence[TransferLost]]) -> None:
        self.said += action()

    def ticket(self, start: int, stop: int, request: int = 1, source: str = "a") -> FeatureTicket:
        """The source sends; what it sends, a draft has to name."""
        self.tickets += 1
        self.targets[source].send(
            Outgoing(
                self.tickets,
                End("draft", 1),
                pieces(start, stop - start, 4 * WIDTH),
                lambda positions: right(request, positions),
                lambda reason: None,
            )
        )
        self.targets[source].advance(self.tickets, stop, lambda: None)
        return FeatureTicket(ticket=self.tickets, peer=source, peer_incarnation=1, start=start)

    def carry(self) -> None:
        """Until nothing is left that could move."""
        while movable := self.wire.movable():
            self.wire.move(*self.wire.random.choice(movable))

    def lose(self, ticket: int) -> None:
        """Both ends notice."""
        for port in (self.port, *self.targets.values()):
            if ticket in port.tickets:
                port.finish(ticket, "the link broke")

    def under_way(self) -> set[int]:
        return {number for port in self.targets.values() for number in port.tickets}


def draft(
    keep: int,
    *tokens: int,
    features: FeatureTicket | None = None,
    request: int = 1,
    task: int = 1,
    **shape: Any,
) -> Draft:
    params = None if keep else GREEDY
    grown = Shape(steps=1, **shape)
    return Draft(
        request=request, epoch=1, task=task, keep=keep, tokens=tokens, shape=grown, params=params, features=features
    )


@pytest.mark.parametrize("seed", range(40))
def test_every_token_gets_the_features_of_the_position_before_it(seed: int) -> None:
    """Texts grow, tickets overtake each other and are lost, the lost are sent again; at times before this was told."""
    bench, random = Bench(seed), Random(seed)
    subject, text, taken, sent = bench.arrivals, [7], 0, 0
    starts: dict[int, int] = {}
    for i in range(60):
        keep = len(text) if i else 0
        text += [7] * random.randint(0 if len(text) > 1 else 1, 3)
        stop, ticket = len(text) - 1, None
        for lost in bench.said:
            sent = min(sent, starts[lost.ticket])
        bench.said.clear()
        if sent < stop:
            ticket = bench.ticket(sent, stop, source=random.choice("ab"))
            starts[ticket.ticket], sent = sent, stop
        subject.expect(draft(keep, *text[keep:], features=ticket), stop, True)
        for _ in range(random.randint(0, 6)):
            if movable := bench.wire.movable():
                bench.wire.move(*random.choice(movable))
        if random.random() < 0.2 and bench.under_way():
            bench.lose(random.choice(sorted(bench.under_way())))
        if subject.covers(1, stop) and random.random() < 0.8:
            found = subject.take(1, taken, text)
            whole = torch.cat((torch.zeros(1, WIDTH), right(1, range(stop))))
            assert torch.equal(found, whole[taken:])
            taken = len(text)
        subject.check([1])
    assert taken > 20
    subject.forget(1)
    bench.carry()
    assert not bench.under_way()
    subject.check([])


def test_a_draft_is_covered_once_all_of_it_has_come() -> None:
    bench = Bench()
    bench.arrivals.expect(draft(0, 1, 2, 3, features=bench.ticket(0, 2)), 2, True)
    bench.arrivals.expect(draft(3, 4, 5, features=bench.ticket(2, 4, source="b")), 4, True)
    first, second = [(port, number) for port, number in bench.wire.movable() if port is bench.port]
    while second in bench.wire.movable():
        assert not bench.arrivals.covers(1, 4)
        bench.wire.move(*second)
    assert not bench.arrivals.covers(1, 4)
    while first in bench.wire.movable():
        bench.wire.move(*first)
    assert bench.arrivals.covers(1, 4)


def test_positions_that_are_neither_here_nor_promised_are_refused_and_nothing_is_changed() -> None:
    bench = Bench()
    late = bench.ticket(3, 4)
    for message, stop in ((draft(0, 1, 2), 1), (draft(0, 1, 2, 3, 4, 5, features=late), 4)):
        with pytest.raises(IllegalTransition, match="features"):
            bench.arrivals.expect(message, stop, True)
        bench.arrivals.check([])
    bench.arrivals.expect(draft(0, 1, 2), 1, False)  # nobody drafts from them yet


def test_behind_a_loss_nothing_is_of_use_until_it_is_sent_again() -> None:
    bench = Bench()
    first = bench.ticket(0, 2)
    bench.arrivals.expect(draft(0, 1, 2, 3, features=first), 2, True)
    bench.arrivals.expect(draft(3, 4, features=bench.ticket(2, 3)), 3, True)
    bench.lose(first.ticket)
    assert [(lost.ticket, lost.freed) for lost in bench.said] == [(first.ticket, False)]
    bench.arrivals.expect(draft(4, 5, features=bench.ticket(3, 4)), 4, True)  # sent before the loss was heard of
    bench.carry()
    assert not bench.under_way()
    assert not bench.arrivals.covers(1, 4)
    bench.arrivals.expect(draft(5, features=bench.ticket(0, 4)), 4, True)
    bench.carry()
    assert torch.equal(bench.arrivals.take(1, 0, (1, 2, 3, 4, 5))[1:], right(1, range(4)))
    assert len(bench.said) == 1


def test_what_was_handed_on_may_come_again() -> None:
    """Who sent it did not know yet that it had arrived."""
    bench = Bench()
    bench.arrivals.expect(draft(0, 1, 2, 3, features=bench.ticket(0, 2)), 2, True)
    bench.carry()
    bench.arrivals.take(1, 0, (1, 2, 3))
    bench.arrivals.expect(draft(3, 4, features=bench.ticket(1, 3)), 3, True)
    bench.carry()
    assert torch.equal(bench.arrivals.take(1, 3, (1, 2, 3, 4)), right(1, range(2, 3)))


# -- a desk that waits for them ----------------------------------------------------------------------


class Reads(Guess):
    """Guesses the length of the text, keeps the features that it was told; breaks where it is told to."""

    taps = (0,)

    def __init__(self) -> None:
        super().__init__(lambda row, text: Proposal.chain([len(text)]))
        self.told: list[Tensor] = []
        self.breaks = False

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        if self.breaks:
            raise RuntimeError("out of luck")
        for row in rows:
            assert row.features is not None
            self.told.append(row.features)
        return super().propose(rows)


def desk(bench: Bench) -> tuple[DraftDesk, Reads]:
    quick = Guess(lambda row, text: Proposal.chain([99]))
    drafter = Reads()
    return DraftDesk(drafter, Ticks(), quick, arrivals=bench.arrivals), drafter


def answered(replies: Sequence[object]) -> list[tuple[int, tuple[int, ...]]]:
    return [(reply.request, reply.tokens) for reply in replies if isinstance(reply, Drafted)]


def test_a_draft_waits_for_its_features_and_holds_up_no_other() -> None:
    bench = Bench()
    subject, drafter = desk(bench)
    subject.receive(draft(0, 1, 2, 3, features=bench.ticket(0, 2)))
    assert not subject.ready()
    subject.receive(draft(0, 1, 2, request=2, quick=True))
    subject.receive(draft(0, 5, request=3))  # a text of one token has no features
    assert answered(subject.step()) == [(2, (99,)), (3, (1,))]
    assert not subject.ready()
    bench.carry()
    assert answered(subject.step()) == [(1, (3,))]
    assert torch.equal(drafter.told[-1][1:], right(1, range(2)))
    subject.receive(draft(2, features=bench.ticket(0, 1, request=2), request=2))  # the quick one had none
    bench.carry()
    assert answered(subject.step()) == [(2, (2,))]
    subject.check()


def test_a_drafter_that_breaks_costs_the_request_its_drafts() -> None:
    """What it was told of features is lost with it. What comes for the request afterwards is of no use."""
    bench = Bench()
    subject, drafter = desk(bench)
    subject.receive(draft(0, 1, 2, 3, features=bench.ticket(0, 2)))
    bench.carry()
    drafter.breaks = True
    fault, refused = subject.step()
    assert isinstance(fault, Fault)
    assert refused == Refused(request=1, epoch=1, reason="drafter", task=1)
    assert subject.receive(draft(3, 4, features=bench.ticket(2, 3))) == []
    bench.carry()
    assert not bench.under_way()  # the source was told
    assert not subject.ready()
    subject.check()


def test_a_gap_is_refused_and_its_source_told() -> None:
    bench = Bench()
    subject, _ = desk(bench)
    [refused] = subject.receive(draft(0, 1, 2, 3, features=bench.ticket(1, 2)))
    assert isinstance(refused, Refused)
    bench.carry()
    assert not bench.under_way()
    subject.check()


def test_a_request_that_is_dropped_or_a_new_life_gives_up_what_is_under_way() -> None:
    bench = Bench()
    subject, _ = desk(bench)
    subject.receive(draft(0, 1, 2, 3, features=bench.ticket(0, 2)))
    assert subject.receive(Drop(request=1, epoch=1)) == [Freed(request=1, epoch=1)]
    subject.receive(draft(0, 1, 2, 3, features=bench.ticket(0, 2)))
    bench.arrivals.reset(2)
    subject.reset()
    bench.carry()
    assert not bench.under_way()
    assert not bench.said
    subject.check()
