"""What workers answered: nonsense of drafters, and drafts that come late."""

from __future__ import annotations

import math
from typing import Any

import pytest

from distspec.coordinator.answers import MAX_OFFENCES
from distspec.protocol.messages import Draft, Drafted, Extend
from tests.machines import Bench, draft, drafted, extend, kinds, says, started, verdict


def drafting(bench: Bench) -> Draft:
    """The draft that was sent last."""
    return [message for _, message in bench.sent if isinstance(message, Draft)][-1]


def grown(bench: Bench) -> list[int]:
    """Tokens of the tree."""
    request = bench.machine.request(1)
    assert request is not None
    return request.tree.shape()[1]


@pytest.mark.parametrize(
    "nonsense",
    [
        {"tokens": (50,), "parents": (-1,)},
        {"tokens": (-1,), "parents": (-1,)},
        {"tokens": (1,) * 65, "parents": tuple(range(-1, 64))},
        {"tokens": (1,), "parents": (0,)},
        {"tokens": (1,), "parents": (-2,)},
        {"tokens": (1, 2), "parents": (-1,)},
        {"tokens": (1,), "parents": (-1,), "scores": (-1.0, -1.0)},
        {"tokens": (1,), "parents": (-1,), "scores": (math.nan,)},
        {"tokens": (1,), "parents": (-1,), "base": 5},
        {"tokens": (1,), "parents": (-1,), "base": 0},
        {"tokens": (1,), "parents": (-1,), "epoch": 9},
        {"tokens": (1,), "parents": (-1,), "task": 1000},
    ],
    ids=[
        "unknown token",
        "negative token",
        "too many",
        "its own parent",
        "no such parent",
        "no parent",
        "too many scores",
        "no score",
        "a text of the future",
        "no text",
        "an epoch of the future",
        "a draft nobody asked for",
    ],
)
def test_a_proposal_that_makes_no_sense_is_taken_as_none(nonsense: dict[str, Any]) -> None:
    bench = started("sd", "draft")
    bench.handle(verdict("decode", 1, 8))
    reply = Drafted(**{"request": 1, "epoch": 1, "task": 2, "base": 4, **nonsense})
    assert bench.handle(says("draft", reply)) == [("decode", extend(3, 3, 8))]
    assert bench.machine.snapshot()["counters"]["bad_drafts"] == 1


def test_a_drafter_that_goes_on_making_no_sense_is_asked_no_more() -> None:
    """And the request goes on without it."""
    bench = started("sd", "draft")
    bench.handle(verdict("decode", 1, 8))
    bad = Drafted(request=1, epoch=1, task=2, base=4, tokens=(99,), parents=(-1,))
    for _ in range(MAX_OFFENCES - 1):
        bench.handle(says("draft", bad))
    commands = bench.handle(says("draft", bad))
    assert kinds(commands) == [("draft", "Drop")]
    extends = [message for name, message in bench.sent if name == "decode" and isinstance(message, Extend)]
    assert kinds(bench.handle(verdict("decode", extends[-1].task, 20))) == [("c", "Output"), ("decode", "Lease")]


def test_a_late_proposal_joins_where_the_text_has_gone() -> None:
    """The second draft was superseded when 20 became a fresh root; its tree had foreseen that."""
    bench = started("dsi", "draft")
    bench.handle(verdict("decode", 1, 8))
    bench.handle(drafted(drafting(bench).task, 9))
    late = drafting(bench)
    bench.handle(verdict("decode", 3, 20))
    assert drafting(bench) == draft(late.task + 1, 4, 20, epoch=2, steps=1, nodes=8)
    bench.handle(drafted(late.task, 20, 21, 22, 9, parents=(-1, 0, 1, -1)))
    assert grown(bench) == [21, 22]


def test_a_draft_that_takes_longer_than_a_verdict_is_not_begun_anew() -> None:
    """When 20 became the root nothing had been drafted yet, so what is under way may be right."""
    bench = started("dsi", "draft")
    bench.handle(verdict("decode", 1, 8))
    late = drafting(bench)
    bench.handle(verdict("decode", 3, 20))
    assert drafting(bench) == late
    bench.handle(drafted(late.task, 20, 21))
    assert grown(bench) == [21]
    assert drafting(bench) != late


def test_a_draft_that_took_longer_than_a_verdict_and_was_wrong_is_made_up_for_at_once() -> None:
    bench = started("dsi", "draft")
    bench.handle(verdict("decode", 1, 8))
    late = drafting(bench)
    bench.handle(verdict("decode", 3, 20))
    bench.handle(drafted(late.task, 9, 10))
    assert grown(bench) == []
    assert drafting(bench).tokens == (20,)
