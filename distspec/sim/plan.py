"""What a schedule is made of: a fleet, its load and its troubles, drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from msgspec import structs

from distspec.coordinator.context import Settings

LONGEST_PROMPT = 26
MOST_TOKENS = 13


@dataclass(frozen=True, slots=True)
class Plan:
    """accept, nonsense: of the drafters. deaths, freezes, drains: of workers. cancels, transfer_loss: rates."""

    settings: Settings
    roles: tuple[str, ...]
    requests: int
    page_size: int
    pages: int
    slots: int
    max_model_len: int
    accept: float
    nonsense: float
    local_drafts: bool
    deaths: int
    freezes: int
    coordinator_deaths: int
    drains: int
    cancels: float
    transfer_loss: float
    vocab: int = 23


def random_plan(seed: int) -> Plan:
    """A small fleet and its troubles."""
    rng = Random(seed)
    roles = ["decode"] * rng.randint(1, 2) + ["verify"] * rng.randint(0, 2)
    roles += ["prefill"] * rng.randint(0, 1) + ["draft"] * rng.randint(0, 2)
    local = rng.random() < 0.3
    page_size = rng.choice((1, 2, 4, 16))
    room = rng.choice((8, 16))
    # Half of the fleets have pages for little more than one request each, so requests push each other out.
    spare = rng.randint(0, 40) if rng.random() < 0.5 else 300
    positions = LONGEST_PROMPT + MOST_TOKENS + 1 + room + 2 * page_size + spare
    plan = Plan(
        settings=Settings(
            policy="sd",
            local_drafts=local,
            steps=rng.choice((None, 1, 2, 4, ((2, 4), (9, 1)))),
            topk=rng.choice((1, 1, 2, 3)),
            nodes=rng.choice((None, 4, 8)),
            lookahead=rng.choice((1, 2, 3)),
            branch_topk=rng.choice((1, 2, 3)),
            branch_width=rng.choice((1, 4)),
            max_live_nodes=rng.choice((8, 24)),
            branch_nodes=rng.choice((1, 5)),
            static=rng.random() < 0.5,
            quick=rng.random() < 0.3,
            room=room,
        ),
        roles=tuple(roles),
        requests=rng.randint(1, 6),
        page_size=page_size,
        pages=-(-positions // page_size) + 2,
        slots=rng.randint(1, 3),
        max_model_len=rng.choice((LONGEST_PROMPT + 2, LONGEST_PROMPT + MOST_TOKENS)),
        accept=rng.choice((0.0, 0.5, 0.9, 1.0)),
        nonsense=rng.choice((0.0, 0.0, 0.3)),
        local_drafts=local,
        deaths=rng.choice((0, 0, 1, 2)),
        freezes=rng.choice((0, 0, 1)),
        coordinator_deaths=rng.choice((0, 0, 0, 1)),
        drains=rng.choice((0, 0, 1, 2)),
        cancels=rng.choice((0.0, 0.3)),
        transfer_loss=rng.choice((0.0, 0.0, 0.3)),
    )
    reads = rng.random() < 0.5
    return replace(plan, settings=structs.replace(plan.settings, features=reads))
