"""The cost model of policies that branch against the timed simulator, which plays every request and worker."""

from __future__ import annotations

from functools import cache

import pytest

from distspec.bench.policies import odds
from distspec.bench.simulate import hardware
from distspec.coordinator.context import Settings
from distspec.sim.timed import Load, TimedWorld
from distspec.speculation import load as speculation
from distspec.speculation.cost import rate
from distspec.speculation.sizes import Sizes

ON = hardware("h200-32b-0.6b")
WIDE = {"branch_width": 32, "max_live_nodes": 1000}
Few = tuple[int, int, int, int]
"""steps, nodes, lookahead, early"""


def named(few: Few) -> dict[str, int]:
    return dict(zip(("steps", "nodes", "lookahead", "branch_nodes"), few, strict=True)) | WIDE


@cache
def seen(policy: str, batch: int, acceptance: float, verifiers: int, few: Few, tokens: int) -> float:
    settings = Settings(policy=policy, static=False, room=1000, **named(few))  # type: ignore[arg-type]
    world = TimedWorld(ON, settings, Load(batch, odds(acceptance)), verifiers)
    return world.measure(tokens // batch, 30).tokens_s


def promised(policy: str, batch: int, acceptance: float, verifiers: int, few: Few) -> float:
    load = speculation.Load(ON.target, ON.drafter, 2 * ON.hop_s, batch, verifiers)
    return rate(policy, Sizes(**named(few)), load, (odds(acceptance),))


@pytest.mark.parametrize(
    ("policy", "batch", "acceptance", "verifiers", "few"),
    [
        ("ssd", 1, 0.7, 1, (4, 8, 2, 16)),
        ("ssd", 8, 0.7, 4, (2, 8, 2, 16)),
        ("bvsp", 1, 0.9, 2, (2, 63, 6, 16)),
        ("bvsp", 1, 0.7, 4, (1, 8, 2, 8)),
        ("bvsp", 8, 0.5, 4, (1, 8, 2, 8)),
        ("bvsp", 8, 0.7, 2, (2, 16, 2, 16)),
        ("bvsp", 8, 0.9, 4, (1, 16, 2, 16)),
    ],
)
def test_it_promises_what_comes(policy: str, batch: int, acceptance: float, verifiers: int, few: Few) -> None:
    """The luck of so few tokens is 3%."""
    found = seen(policy, batch, acceptance, verifiers, few, 2000)
    assert promised(policy, batch, acceptance, verifiers, few) == pytest.approx(found, rel=0.08)


@pytest.mark.parametrize(
    ("batch", "acceptance", "verifiers", "better", "worse"),
    [
        (8, 0.5, 4, (1, 8, 2, 8), (4, 16, 2, 16)),
        (8, 0.7, 4, (2, 8, 2, 4), (2, 8, 2, 16)),
        (8, 0.9, 2, (2, 8, 2, 8), (1, 4, 2, 4)),
        (1, 0.9, 4, (4, 63, 2, 16), (1, 4, 6, 8)),
    ],
)
def test_it_tells_good_sizes_of_bvsp_from_bad_ones(
    batch: int, acceptance: float, verifiers: int, better: Few, worse: Few
) -> None:
    """As the simulator does: between 7 and 20% lie between them."""
    cell = "bvsp", batch, acceptance, verifiers
    assert seen(*cell, better, 1600) > 1.03 * seen(*cell, worse, 1600)
    assert promised(*cell, better) > 1.03 * promised(*cell, worse)
