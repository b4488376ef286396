"""The kernels of rounds against the plain torch of engine/rolling/ops.py; tests/gpu runs the same checks compiled."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.engine.rolling import ops
from distspec.kernels import rolling
from tests.unit.kernels.test_elementwise import CPU

pytestmark = pytest.mark.needs("interpreter")


def check_spread(seed: int, device: torch.device) -> None:
    draw = random.Random(seed)
    slots, count, offset, stepwise = 5, draw.randint(1, 6), draw.randint(-2, 1), draw.random() < 0.5
    state = (
        torch.randint(0, 40, (slots + 1,)),
        torch.randint(-(2**62), 2**62, (slots + 1, 3)),
        torch.rand(slots + 1, 3),
        torch.tensor([*draw.sample(range(slots), draw.randint(1, slots)), slots, slots]),
    )
    want = ops.spread(*state, offset, count, stepwise=stepwise)
    got = rolling.spread(*(part.to(device) for part in state), offset, count, stepwise)
    for one, other in zip(got, (want.positions, want.integers, want.reals), strict=True):
        assert torch.equal(one.cpu(), other)


def check_settle(seed: int, device: torch.device) -> None:
    """Drafts that are often right: all lengths of accepted runs occur."""
    draw = random.Random(seed)
    slots, count = 6, draw.randint(1, 6)
    own = [*draw.sample(range(slots), draw.randint(1, slots)), slots]
    state = [torch.randint(0, 40, (slots + 1,)), torch.randint(0, 9, (slots + 1, 2))]
    inputs = [torch.tensor(own), torch.randint(0, 2, (len(own), count)), torch.randint(0, 2, (len(own), count))]
    there = [part.clone().to(device) for part in state]
    want = ops.settle(*state, *inputs)
    got = rolling.settle(*there, *(part.to(device) for part in inputs))
    assert torch.equal(got.cpu(), want)
    for one, other in zip(there, state, strict=True):
        # Of what only pads, the last row writes tokens last; nobody reads them.
        assert torch.equal(one.cpu()[:slots], other[:slots])
    assert there[0][slots] == 0


def check_make_up(seed: int, odds: float | None, vocab: int, device: torch.device) -> None:
    """Strided rows, as those of a drafter's first step are."""
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(-(2**63), 2**63 - 1, (80, 4), generator=generator)[::2]
    tokens = torch.randint(0, vocab, (80,), generator=generator)[1::2]
    want = ops.make_up(integers, tokens, vocab, odds)
    least = None if odds is None else ops.below(odds)
    assert torch.equal(rolling.make_up(integers.to(device), tokens.to(device), vocab, least).cpu(), want)


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_rows_stand_where_they_should(seed: int) -> None:
    check_spread(seed, CPU)


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_what_leads_is_accepted(seed: int) -> None:
    check_settle(seed, CPU)


@settings(max_examples=20)
@given(
    st.integers(0, 2**32),
    st.one_of(st.none(), st.sampled_from([0.0, 0.8, 1.0]), st.floats(0, 1)),
    st.integers(2, 2**17),
)
def test_made_up_tokens_are_the_same(seed: int, odds: float | None, vocab: int) -> None:
    check_make_up(seed, odds, vocab, CPU)
