"""Sizes that are worth comparing."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from distspec.speculation.grid import candidates
from distspec.speculation.policies import POLICIES
from distspec.speculation.sizes import Sizes

MOST = Sizes(steps=8, topk=1, nodes=16, lookahead=8, max_live_nodes=48)
DRAFTING = [policy for policy in POLICIES if policy != "ar"]


@pytest.mark.parametrize(
    "most", [MOST, replace(MOST, steps=1, nodes=1, lookahead=1, max_live_nodes=4), replace(MOST, topk=3, nodes=7)]
)
def test_every_policy_that_drafts_has_some_each_once_and_within_their_bounds(most: Sizes) -> None:
    found = list(candidates(POLICIES, most))
    assert {policy for policy, _ in found} == set(DRAFTING)
    assert len(set(found)) == len(found)
    for _, sizes in found:
        for name in (field.name for field in fields(Sizes)):
            assert 1 <= getattr(sizes, name) <= getattr(most, name), (name, sizes)
