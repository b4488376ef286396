"""What a request is to do: how deep its rounds are, and how many nodes they judge."""

from __future__ import annotations

from typing import Any

import pytest

from distspec.protocol.messages import Draft, Extend, Lease
from tests.machines import Bench, drafted, started, submit, verdict


def test_a_round_is_as_deep_as_asked_configured_or_worth_it() -> None:
    def levels(wide: int | None, steps: Any, step_cost: tuple[float, ...] = (), running: int = 1) -> int:
        bench = Bench("draft", steps=steps)
        bench.join("decode", step_cost=step_cost)
        for i in range(running):
            bench.handle(submit(key=f"{i}", policy="sd", wide=wide, max_tokens=50))
        commands = bench.handle(verdict("decode", 1, 8))
        return next(message.shape.steps for _, message in commands if isinstance(message, Draft))

    assert levels(5, 3) == 5
    assert levels(None, 3) == 3
    assert levels(None, None) == 8  # no step cost was measured: a wider step is free
    assert levels(None, None, step_cost=(1.0, 2.0, 4.0)) == 1
    table = ((1, 4), (3, 2))
    assert [levels(None, table, running=n) for n in (1, 2, 3, 4)] == [4, 2, 2, 2]


def test_the_more_requests_share_a_step_the_fewer_drafts_are_worth_their_rows() -> None:
    def levels(running: int, targets: int = 1, local: bool = False) -> int:
        bench = Bench("draft", steps=None, local_drafts=local)
        for i in range(targets):
            bench.join(f"decode{i}", step_cost=(1.0, 1.0, 1.0, 1.1, 1.3), slots=16, drafts=local)
        for i in range(running):
            bench.handle(submit((5, 6, i), key=f"{i}", policy="sd", max_tokens=50))
        commands = bench.handle(verdict("decode0", 1, 8))
        shapes = (message.shape for _, message in commands if isinstance(message, Draft | Lease))
        return next(shape.steps for shape in shapes if shape is not None)

    alone, four, twelve = levels(1), levels(4), levels(12)
    assert alone > four > twelve
    assert levels(4, targets=4) == alone
    assert levels(12, local=True) == alone  # or leases that began under another load would be in rounds of their own


@pytest.mark.parametrize(
    ("step_cost", "settings", "judged"),
    [
        ((), {}, 5),  # rows cost nothing
        ((1.0, 1.0, 1.0, 1.0, 1.0), {}, 5),
        ((1.0, 1.3, 2.0, 4.0, 8.0), {}, 2),  # no more than a round drafts that waits for its draft
        ((), {"nodes": 3}, 3),  # as configured
        ((), {"room": 4}, 4),
    ],
)
def test_what_was_foreseen_is_judged_as_deep_as_its_rows_are_worth(
    step_cost: tuple[float, ...], settings: dict[str, int], judged: int
) -> None:
    """It is drafted already, so a round may be deeper than one that has to wait for its draft."""
    bench = Bench("draft", steps=2, **{"room": 16, **settings})
    bench.join("decode", step_cost=step_cost)
    bench.handle(submit(policy="ssd"))
    bench.handle(verdict("decode", 1, 8))
    bench.handle(drafted(2, 9, 10))
    bench.handle(drafted(4, *range(9, 16)))
    commands = bench.handle(verdict("decode", 3, 9, (2, 10)))
    assert [len(message.nodes) for _, message in commands if isinstance(message, Extend)] == [judged]


def test_acceptance_is_of_the_guesses_that_are_judged() -> None:
    """Not of those that only made an outcome foreseen: a chain is as long as its own nodes are right."""

    def acceptance(topk: int) -> float:
        bench = started("ssd", "draft", topk=topk, nodes=2)
        bench.handle(verdict("decode", 1, 8))
        bench.handle(drafted(2, 9, 10, parents=(-1, -1)))
        bench.handle(drafted(4, 9, 10, 11, parents=(-1, -1, 1)))
        before: float = bench.machine.snapshot()["acceptance"]
        bench.handle(verdict("decode", 3, 10))
        after: float = bench.machine.snapshot()["acceptance"]
        return after - before

    assert acceptance(topk=1) < 0 < acceptance(topk=2)


@pytest.mark.parametrize(("settings", "judged"), [({}, 7), ({"nodes": 8}, 8)])
def test_a_tree_that_nobody_has_sized_has_no_more_rows_than_scratch_has_nodes(
    settings: dict[str, int], judged: int
) -> None:
    """The root counted: one more row than a power of two pays for twice as many."""
    bench = started("sd", "draft", topk=2, steps=3, room=8, **settings)
    bench.handle(verdict("decode", 1, 8))
    commands = bench.handle(drafted(2, *range(9, 19), parents=(-1, -1, 0, 0, 1, 1, 2, 2, 3, 3)))
    [message] = [message for _, message in commands if isinstance(message, Extend)]
    assert len(message.nodes) == judged
