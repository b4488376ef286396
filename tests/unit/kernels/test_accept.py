"""Acceptance and move against a walk written out; tests/gpu runs the same check compiled."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.kernels.accept import accept_and_move, accept_and_move_reference
from tests.unit.kernels.test_elementwise import CPU

pytestmark = pytest.mark.needs("interpreter")


def check_accept(seed: int, slots: int, nodes: int, width: int, device: torch.device, dtype: torch.dtype) -> int:
    """Random trees over three tokens, some with fewer nodes, in scratch or right at the end; how many were accepted."""
    draw, planes = random.Random(seed), 3
    tokens, parents, outcomes, sources, targets = [], [], [], [], []
    free = draw.sample(range(4 * slots * nodes), 4 * slots * nodes)
    for _ in range(slots):
        count = draw.randint(1, nodes)
        parents.append([draw.randint(max(-1, i - 3), i - 1) for i in range(count)] + [-2] * (nodes - count))
        tokens.append([draw.randint(0, 2) for _ in range(nodes)])
        outcomes.append([draw.randint(0, 2) for _ in range(nodes + 1)])
        own = [free.pop() for _ in range(2 * nodes)]
        targets.append(own[:nodes])
        sources.append(own[:nodes] if draw.random() < 0.5 else own[nodes:])
    trees = [torch.tensor(rows, device=device) for rows in (tokens, parents, outcomes)]
    moves = [torch.tensor(rows, device=device) for rows in (sources, targets)]
    pools = [torch.randn(planes, 4 * slots * nodes, width).to(device, dtype)]
    pools.append(pools[0].clone())
    got = accept_and_move(trees[0], trees[1], trees[2], moves[0], moves[1], pools[0])
    want = accept_and_move_reference(trees[0], trees[1], trees[2], moves[0], moves[1], pools[1])
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(pools[0], pools[1])
    return int(got[1].sum())


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([1, 2, 5, 16]), st.sampled_from([1, 24, 600]))
def test_paths_and_what_moves(seed: int, slots: int, nodes: int, width: int) -> None:
    check_accept(seed, slots, nodes, width, CPU, torch.float32)


def test_long_paths_are_among_them() -> None:
    """Nodes that lie where they will be committed, in another order, are moved as well."""
    assert max(check_accept(seed, 2, 16, 8, CPU, torch.float32) for seed in range(20)) >= 4
