"""`auto` changes its mind, and no token: requests go from policy to policy in the midst of their answers.

The planner takes its time, since measurements of real fleets are noisy. Requests here are short, so it is hurried: it
values candidates early, measures a few tokens, and believes what it measured. Messages take long here, so policies
yield less than the model promises, and one after the other is tried.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from distspec.coordinator import advisor, choosing, planner
from distspec.coordinator.context import Context
from distspec.coordinator.request import Request
from distspec.models.llama import Llama
from distspec.speculation.policies import POLICIES
from tests.matrix import DRAFTERS, READERS, Answers, Cell, every, keep_killing, name, serve

pytestmark = pytest.mark.usefixtures("one_thread")

HURRIED = {
    "LEAST": 10,
    "WINDOW": 8,
    "WINDOW_STEPS": 1,
    "SETTLE_STEPS": 0,
    "SETTLE_S": 0.0,
}

Chosen = dict[int, list[str]]
"""The policies that were chosen for each request, in order."""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Chosen:
    for constant, value in HURRIED.items():
        users = [module for module in (planner, advisor) if hasattr(module, constant)]
        assert users, constant
        for module in users:
            monkeypatch.setattr(module, constant, value)
    tune, choices = choosing.tune, defaultdict[int, list[str]](list)

    def noted(ctx: Context, request: Request) -> bool:
        changed = tune(ctx, request)
        if changed:
            choices[request.number].append(request.acting)
        return changed

    monkeypatch.setattr(choosing, "tune", noted)
    return choices


CELLS = every(["auto"], DRAFTERS) + [Cell("auto", 2, drafter, False, 16, "static") for drafter in READERS]


@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_the_answers_are_the_plain_targets(cell: Cell, target: Llama, answers: Answers, chosen: Chosen) -> None:
    fleet = serve(cell.fleet(target, seed=CELLS.index(cell)))
    answers.judge(fleet)
    used = {policy for policies in chosen.values() for policy in policies}
    if cell.colocated:
        assert used <= {"ar", "sd"}  # what a decode worker does by itself
        assert fleet.seen["decode", "Progress"]
    else:
        assert any(len(set(policies)) > 1 for policies in chosen.values()), "nobody changed in the midst of an answer"
        assert fleet.seen["draft", "Drafted"]
        assert (fleet.seen["verify", "Verdict"] > 0) == (cell.verifiers > 0)


@pytest.mark.parametrize("role", ["prefill", "decode", "verify", "draft"])
def test_a_worker_that_dies_changes_no_token(role: str, target: Llama, answers: Answers, chosen: Chosen) -> None:
    keep_killing(Cell("auto", 2, "layers", False, 16, "static"), role, 1, target, answers)
    assert any(len(set(policies)) > 1 for policies in chosen.values())


def test_every_policy_gets_its_turn(target: Llama, answers: Answers, chosen: Chosen) -> None:
    """Of a fleet that lives on, all that its verifiers allow are tried."""
    fleet = Cell("auto", 2, "random", False, 16, "static").fleet(target, seed=1)
    for _ in range(10):
        answers.judge(serve(fleet))
        used = {policy for policies in chosen.values() for policy in policies}
        if used == set(POLICIES):
            return
    pytest.fail(f"only {sorted(used)} in {fleet.turns} turns")
