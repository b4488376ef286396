"""One request, one answer: whatever policy, drafter, page size, placement and number of verifiers serve it.

Greedy answers are those of transformers on the same weights, sampled ones those of the plain target.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from msgspec.structs import replace

from distspec.engine import Begun, Flight, Rolling
from distspec.models.llama import Llama
from distspec.protocol.values import SamplingParams
from distspec.sampling import edited
from distspec.speculation.policies import EAGER
from tests.fleet import Fleet
from tests.matrix import (
    DRAFTERS,
    LONG,
    PAGES,
    POLICIES,
    READERS,
    REQUESTS,
    SEEDED,
    TREES,
    Answers,
    Cell,
    emitted,
    every,
    keep_killing,
    name,
    serve,
    submit,
)
from tests.teacher import plain

pytestmark = pytest.mark.usefixtures("one_thread")

CELLS = every(POLICIES, DRAFTERS) + every(POLICIES[1:], READERS)
"""Features are read in the draft pool, which gets them from home or a verifier, and inside home."""


@pytest.mark.parametrize("cell", CELLS, ids=name)
def test_the_answers_are_the_plain_targets(cell: Cell, target: Llama, answers: Answers) -> None:
    fleet = serve(cell.fleet(target, seed=CELLS.index(cell)))
    answers.judge(fleet)
    check_that_all_took_part(cell, fleet)


def check_that_all_took_part(cell: Cell, fleet: Fleet) -> None:
    """Answers prove nothing about workers that had no part in them."""
    seen, accepted = fleet.seen, sum(s.usage.accepted for s in fleet.streams.values() if s.usage)
    driven = cell.policy != "ar" and not (cell.policy == "sd" and cell.colocated)
    assert (seen["prefill", "Verdict"] > 0) == (not cell.colocated)
    assert (seen["decode", "Received"] > 0) == (not cell.colocated)
    assert (seen["decode", "Progress"] > 0) == (not driven)
    assert (seen["decode", "Drafted"] > 0) == (driven and cell.colocated)
    assert (seen["draft", "Drafted"] > 0) == (driven and not cell.colocated)
    at_home = cell.colocated and cell.drafter in READERS and cell.policy not in EAGER
    assert (seen["verify", "Verdict"] > 0) == (driven and cell.verifiers > 0 and not at_home)
    if cell.drafter != "wrong":
        assert (accepted > 0) == (cell.policy != "ar")
    elif cell.tree == "chain" and cell.policy in ("ar", "sd", "pearl", "dsi"):
        assert not accepted  # of a tree that is never right first, another guess may be
    assert any(s.usage.cached_tokens for s in fleet.streams.values() if s.usage)


# -- rounds that roll on the device --------------------------------------------------------------------

ROLLING = [
    Cell(policy, i % 3, drafter, True, PAGES[i % len(PAGES)], overlap=overlap)
    for i, (policy, drafter, overlap) in enumerate(product(("ar", "sd"), ("random", "layers", "right"), (True, False)))
]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Drafts of each round that any worker launched."""
    steps: list[int] = []
    launch, begin = Rolling.launch, Rolling.begin

    def launched(rolling: Rolling, slots: Sequence[int], drafts: int) -> Flight:
        steps.append(drafts)
        return launch(rolling, slots, drafts)

    def begun(rolling: Rolling, slots: Sequence[int], drafts: int) -> Begun:
        steps.append(drafts)
        return begin(rolling, slots, drafts)

    monkeypatch.setattr(Rolling, "launch", launched)
    monkeypatch.setattr(Rolling, "begin", begun)
    return steps


@pytest.mark.parametrize("cell", ROLLING, ids=name)
def test_rounds_that_roll_give_these_answers(cell: Cell, target: Llama, answers: Answers, launched: list[int]) -> None:
    fleet = serve(cell.fleet(target, seed=ROLLING.index(cell)))
    answers.judge(fleet)
    check_that_all_took_part(cell, fleet)
    assert set(launched) == {0 if cell.policy == "ar" else 3}


def test_trees_do_not_roll(target: Llama, answers: Answers, launched: list[int]) -> None:
    answers.judge(serve(Cell("sd", 0, "layers", True, 16, "static").fleet(target, seed=0)))
    assert not launched


@pytest.mark.parametrize("policy", ["ar", "sd"])
@pytest.mark.parametrize("seed", range(2))
def test_rounds_that_roll_bear_deaths_and_clients_that_go(
    seed: int, policy: str, target: Llama, answers: Answers, launched: list[int]
) -> None:
    cell = Cell(policy, 0, ("layers", "right")[seed], True, PAGES[seed])
    keep_killing(cell, "decode", seed, target, answers)
    fleet = cell.fleet(target, seed=seed)
    submit(fleet)
    for tokens, key in zip((1, 20, 50), list(REQUESTS)[::3], strict=False):
        fleet.run(until=lambda tokens=tokens: emitted(fleet) >= tokens)  # type: ignore[misc]
        fleet.cancel(key)
    fleet.restart_coordinator()
    fleet.run()
    answers.judge(fleet)
    assert launched


@pytest.mark.parametrize("policy", ["ar", "sd"])
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 130), (4, 34)])
def test_rounds_that_roll_bear_preemption(
    policy: str, page_size: int, num_pages: int, target: Llama, answers: Answers, launched: list[int]
) -> None:
    """Pages run out for target and drafter."""
    fleet = serve(Cell(policy, 0, "layers", True, page_size, num_pages=num_pages).fleet(target, seed=page_size))
    answers.judge(fleet)
    assert any(kind == "Refused" for _, kind in fleet.seen)
    assert launched


# -- trouble -----------------------------------------------------------------------------------------

ROLES = ("prefill", "decode", "verify", "draft")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("role", ROLES)
def test_a_worker_that_dies_changes_no_token(role: str, policy: str, target: Llama, answers: Answers) -> None:
    i = len(ROLES) * POLICIES.index(policy) + ROLES.index(role)
    cell = Cell(policy, 2, DRAFTERS[i % len(DRAFTERS)], False, PAGES[i // 4 % len(PAGES)], list(TREES)[i % len(TREES)])
    keep_killing(cell, role, i, target, answers)


@pytest.mark.parametrize(
    ("role", "policy"),
    [("prefill", "sd"), ("decode", "dsi"), ("verify", "bvsp"), ("verify", "sd"), ("draft", "ssd"), ("draft", "pearl")],
)
def test_a_worker_that_dies_with_features_under_way_changes_no_token(
    role: str, policy: str, target: Llama, answers: Answers
) -> None:
    seed = POLICIES.index(policy)
    keep_killing(Cell(policy, 2, READERS[seed % 4], False, PAGES[seed % 4], "static"), role, seed, target, answers)


@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_a_coordinator_that_dies_repeats_and_loses_no_token(
    seed: int, colocated: bool, target: Llama, answers: Answers
) -> None:
    drafter = DRAFTERS[seed] if colocated or seed % 2 else READERS[seed]
    cell = Cell(POLICIES[seed + 1], 1, drafter, colocated, 16, list(TREES)[seed % 3])
    fleet = cell.fleet(target, seed=seed)
    submit(fleet)
    for tokens in (1, 40, 80):
        fleet.run(until=lambda tokens=tokens: emitted(fleet) >= tokens)  # type: ignore[misc]
        fleet.restart_coordinator()
    fleet.run()
    answers.judge(fleet)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 130), (4, 34)])
def test_requests_that_pages_run_out_for_are_computed_again(
    policy: str, colocated: bool, page_size: int, num_pages: int, target: Llama, answers: Answers
) -> None:
    cell = Cell(policy, 1, "ngram", colocated, page_size, num_pages=num_pages)
    fleet = serve(cell.fleet(target, seed=page_size))
    answers.judge(fleet)
    assert any(kind == "Refused" for _, kind in fleet.seen)


def test_requests_that_pages_run_out_for_take_their_features_along(target: Llama, answers: Answers) -> None:
    fleet = serve(Cell("ssd", 1, "eagle3", False, 4, "static", num_pages=34).fleet(target, seed=4))
    answers.judge(fleet)
    assert any(kind == "Refused" for _, kind in fleet.seen)


@pytest.mark.parametrize("seed", range(6))
def test_kv_links_that_break_change_no_token(seed: int, target: Llama, answers: Answers) -> None:
    cell = Cell(POLICIES[seed], 2, "layers", False, 16, list(TREES)[seed % 3])
    fleet = serve(cell.fleet(target, seed=seed, loss=0.15))
    answers.judge(fleet)
    assert fleet.machine.snapshot()["counters"]["transfers_lost"] > 0


@pytest.mark.parametrize("seed", range(1, 6))
def test_features_that_are_lost_on_the_way_change_no_token(seed: int, target: Llama, answers: Answers) -> None:
    cell = Cell(POLICIES[seed], 2, READERS[seed % 4], False, 16, list(TREES)[seed % 3])
    fleet = serve(cell.fleet(target, seed=seed, loss=0.08))
    answers.judge(fleet)
    assert fleet.machine.snapshot()["counters"]["features_lost"] > 0


@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_clients_that_go_away_disturb_nobody(seed: int, colocated: bool, target: Llama, answers: Answers) -> None:
    drafter = DRAFTERS[seed] if colocated or seed % 2 else READERS[seed + 1]
    cell = Cell(POLICIES[seed + 2], 1, drafter, colocated, 16, list(TREES)[seed % 3])
    fleet = cell.fleet(target, seed=seed)
    submit(fleet)
    for tokens, key in zip((1, 20, 50), list(REQUESTS)[1:7:2], strict=True):
        fleet.run(until=lambda tokens=tokens: emitted(fleet) >= tokens)  # type: ignore[misc]
        fleet.cancel(key)
    fleet.run()
    answers.judge(fleet)
    assert any(stream.finished == "abort" for stream in fleet.streams.values())


# -- choices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("colocated", [True, False])
def test_each_request_may_choose_its_policy(colocated: bool, target: Llama, answers: Answers) -> None:
    """Also its number of drafts is its own here: it follows acceptance and cost."""
    fleet = Cell("sd", 1, "layers", colocated, 16).fleet(target, seed=1, steps=None)
    for i, (key, (prompt, params)) in enumerate(REQUESTS.items()):
        fleet.submit(key, prompt, params, policy=POLICIES[i % len(POLICIES)])
    fleet.run()
    answers.judge(fleet)
    assert {stream.usage.policy for stream in fleet.streams.values() if stream.usage} == set(POLICIES)


def test_choices_of_one_request_differ_and_can_be_had_again(target: Llama) -> None:
    """n=3 is one seed and three choices."""
    wanted = {choice: replace(SEEDED, choice=choice) for choice in range(3)}
    right = {choice: plain(target, LONG, params)[0] for choice, params in wanted.items()}
    assert len({tuple(tokens) for tokens in right.values()}) == 3
    for seed, policy in enumerate(POLICIES):
        fleet = Cell(policy, 1, "layers", False, 16).fleet(target, seed=seed)
        for choice, params in wanted.items():
            fleet.submit(str(choice), LONG, params)
        fleet.run()
        assert {choice: fleet.streams[str(choice)].tokens for choice in wanted} == right


def test_what_changes_the_logits_changes_the_answers(target: Llama, answers: Answers) -> None:
    """Or agreement would prove nothing."""
    for key, params in ((key, params) for key, (_, params) in REQUESTS.items() if edited(params)):
        prompt, plainly = (
            REQUESTS[key][0],
            SamplingParams(
                max_tokens=params.max_tokens,
                seed=params.seed,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                stop_token_ids=params.stop_token_ids,
            ),
        )
        assert plain(target, prompt, plainly)[0] != answers.right[key][0]
    assert sum(edited(params) for _, params in REQUESTS.values()) == 6
