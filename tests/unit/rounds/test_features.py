"""What a local drafter is told of the target's hidden states: each token with those of the position before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from distspec import config
from distspec.drafters.base import DraftRow, Proposal
from distspec.engine import Engine
from distspec.models import Taps
from distspec.protocol.messages import Draft, Extend, Fault
from distspec.protocol.values import ROOT, Node, Shape
from distspec.rounds import Desk, Reply
from tests.causal import Causal
from tests.desks import CPU, GREEDY, Guess, bushy, desk, extend, lease, model, oracle, plain, run, stream

PROMPT = (1, 2, 3, 4, 5, 1, 2)
TAPS = (2, 0)


@torch.inference_mode()
def dense(text: Sequence[int]) -> Tensor:
    """[len(text), F]: the features that belong to each token, by one forward without pages."""
    found = Taps(TAPS)
    model().forward(torch.tensor(text), torch.arange(len(text)), Causal(), found)
    return torch.cat((torch.zeros_like(found.features()[:1]), found.features()[:-1]))


class Reads(Guess):
    """Wants features, and keeps what it heard of each text, by call: what a drafter raises is only a fault."""

    taps = TAPS

    def __init__(self, grow: Callable[[DraftRow, tuple[int, ...]], Proposal] = oracle) -> None:
        super().__init__(grow)
        self.told: dict[int, Tensor] = {}
        self.heard: list[tuple[tuple[int, ...], Tensor]] = []

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        out = super().propose(rows)
        for row in rows:
            assert row.features is not None
            kept = self.told[row.request][: row.keep] if row.keep else row.features[:0]
            self.told[row.request] = torch.cat((kept, row.features))
            self.heard.append((self._texts[row.request], self.told[row.request]))
        return out


def rest(of: Desk) -> list[Reply]:
    """Run to the end, where no drafter broke."""
    replies = run(of)
    assert not any(isinstance(reply, Fault) for reply in replies)
    return replies


def engine(page_size: int = 4, taps: tuple[int, ...] = TAPS) -> Engine:
    return Engine(model(), config.Engine(page_size=page_size, num_pages=800 // page_size), device=CPU, taps=taps)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("grow", [oracle, bushy])
@pytest.mark.parametrize("nodes", [1, 6])
def test_leased_rounds_tell_the_features_of_all_that_is_committed(
    page_size: int, grow: Callable[[DraftRow, tuple[int, ...]], Proposal], nodes: int
) -> None:
    """Through pairs and trees alike; the second request finds its prompt in the prefix cache."""
    drafter = Reads(grow)
    subject = desk(engine(page_size), drafter, budget=8)
    for request in (1, 2):
        subject.receive(lease(request, PROMPT, GREEDY, shape=Shape(steps=nodes), nodes=nodes))
        assert stream(rest(subject), request) == plain(PROMPT, GREEDY)
    assert len(drafter.heard) > 4
    for text, told in drafter.heard:
        torch.testing.assert_close(told, dense(text), atol=1e-5, rtol=1e-5)


def draft(task: int, keep: int, tokens: Sequence[int]) -> Draft:
    params = None if keep else GREEDY
    return Draft(request=1, epoch=1, task=task, keep=keep, tokens=tuple(tokens), shape=Shape(steps=1), params=params)


def test_tokens_that_are_still_nodes_here_have_the_features_of_these_nodes() -> None:
    """A driven request: what was accepted is committed with the next Extend, and the drafter is asked before it."""
    right = plain(PROMPT, GREEDY)
    drafter = Reads()
    subject = desk(engine(), drafter)
    subject.receive(extend(1, PROMPT))
    run(subject)
    subject.receive(draft(1, 0, [*PROMPT, right[0]]))
    rest(subject)
    tree = [Node(id=0, parent=ROOT, token=9), *(Node(id=i + 1, parent=i or ROOT, token=right[i + 1]) for i in range(3))]
    subject.receive(Extend(request=1, epoch=1, task=2, start=len(PROMPT), tokens=(right[0],), nodes=tuple(tree)))
    run(subject)
    subject.receive(draft(3, len(PROMPT) + 1, right[1:5]))
    rest(subject)
    text, told = drafter.heard[-1]
    assert text == (*PROMPT, *right[:5])
    torch.testing.assert_close(told, dense(text), atol=1e-5, rtol=1e-5)


def test_positions_that_others_computed_have_no_features() -> None:
    drafter = Reads()
    subject = desk(engine(), drafter)
    subject.receive(extend(1, PROMPT))
    run(subject)
    subject.receive(draft(1, 0, [*PROMPT, *plain(PROMPT, GREEDY)[:4]]))
    rest(subject)
    [(text, told)] = drafter.heard
    known = len(PROMPT) + 1  # the first token that is not here was drawn from the last one that is
    assert len(told) == len(text) == len(PROMPT) + 4
    torch.testing.assert_close(told[:known], dense(text)[:known], atol=1e-5, rtol=1e-5)
    assert not told[known:].any()


def test_a_draft_is_told_of_its_own_text_where_the_target_has_gone_on_already() -> None:
    """The Extend behind it was taken up before it."""
    right = plain(PROMPT, GREEDY)
    drafter = Reads()
    subject = desk(engine(), drafter)
    subject.receive(extend(1, PROMPT, nodes=(Node(id=1, parent=ROOT, token=right[0]),)))
    run(subject)
    subject.receive(draft(1, 0, PROMPT))
    subject.receive(Extend(request=1, epoch=1, task=2, start=len(PROMPT) + 1, tokens=(right[1],), commit=(1,)))
    rest(subject)
    [(text, told)] = drafter.heard
    assert text == PROMPT
    torch.testing.assert_close(told, dense(text), atol=1e-5, rtol=1e-5)
