"""What a local drafter is told of the target's hidden states: each token with those of the position before it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from distspec import config
from distspec.drafters.base import DraftRow, Proposal
from distspec.engine import Engine
from distspec.models import Taps
from distspec.protocol.messages import ROOT, Draft, Extend, Node, Shape
from tests.causal import Causal
from tests.desks import CPU, GREEDY, SHAPE, Guess, bushy, desk, extend, lease, model, oracle, plain, run, stream

PROMPT = (1, 2, 3, 4, 5, 1, 2)
TAPS = (2, 0)


@torch.inference_mode()
def dense(text: Sequence[int]) -> Tensor:
    """[len(text), F]: the features that belong to each token, by one forward without pages."""
    found = Taps(TAPS)
    model().forward(torch.tensor(text), torch.arange(len(text)), Causal(), found)
    return torch.cat((torch.zeros_like(found.features()[:1]), found.features()[:-1]))


class Reads(Guess):
    """Wants features, and keeps what it was told of each text."""

    taps = TAPS

    def __init__(self, grow: object = oracle) -> None:
        super().__init__(grow)  # type: ignore[arg-type]
        self.told: dict[int, Tensor] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        out = super().propose(rows)
        for row in rows:
            assert row.features is not None
            assert row.features.shape == (len(row.tokens), 2 * SHAPE.hidden_size)
            kept = self.told[row.request][: row.keep] if row.keep else row.features[:0]
            self.told[row.request] = torch.cat((kept, row.features))
            self.seen(row.request)
        return out

    def seen(self, request: int) -> None:
        assert torch.allclose(self.told[request], dense(self._texts[request]), atol=1e-5)


def engine(page_size: int = 4, taps: tuple[int, ...] = TAPS) -> Engine:
    return Engine(model(), config.Engine(page_size=page_size, num_pages=800 // page_size), device=CPU, taps=taps)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("grow", [oracle, bushy])
@pytest.mark.parametrize("nodes", [1, 6])
def test_leased_rounds_tell_the_features_of_all_that_is_committed(page_size: int, grow: object, nodes: int) -> None:
    """Through pairs and trees alike; the second request finds its prompt in the prefix cache."""
    drafter = Reads(grow)
    subject = desk(engine(page_size), drafter, budget=8)
    for request in (1, 2):
        subject.receive(lease(request, PROMPT, GREEDY, shape=Shape(steps=nodes), nodes=nodes))
        assert stream(run(subject), request) == plain(PROMPT, GREEDY)
        assert len(drafter.told[request]) > len(PROMPT)


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
    run(subject)
    tree = [Node(id=0, parent=ROOT, token=9), *(Node(id=i + 1, parent=i or ROOT, token=right[i + 1]) for i in range(3))]
    subject.receive(Extend(request=1, epoch=1, task=2, start=len(PROMPT), tokens=(right[0],), nodes=tuple(tree)))
    run(subject)
    subject.receive(draft(3, len(PROMPT) + 1, right[1:5]))
    run(subject)
    assert len(drafter.told[1]) == len(PROMPT) + 5


def test_positions_that_others_computed_have_no_features() -> None:
    class Partly(Reads):
        def seen(self, request: int) -> None:
            told, whole = self.told[request], dense(self._texts[request])
            known = len(PROMPT) + 1  # the token that is not there was drawn from the last one that is
            assert torch.allclose(told[:known], whole[:known], atol=1e-5)
            assert not told[known:].any()

    drafter = Partly()
    subject = desk(engine(), drafter)
    subject.receive(extend(1, PROMPT))
    run(subject)
    subject.receive(draft(1, 0, [*PROMPT, *plain(PROMPT, GREEDY)[:4]]))
    run(subject)
    assert len(drafter.told[1]) == len(PROMPT) + 4
