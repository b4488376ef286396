"""What FlashAttention is asked for, and where it is refused; what it computes is tested on a GPU."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distspec.attention import Span, choose
from distspec.attention.flash import FlashBackend, missing_for_flash, straightened
from distspec.errors import InvalidValue
from distspec.kv.pool import KVPool
from tests.unit.attention.test_sdpa import CPU, random_span, visible


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 6, 20]))
def test_a_chain_as_committed_rows_sees_the_same(seed: int, rows: int) -> None:
    span = random_span(random.Random(seed), list(range(200)), 4, rows)
    straight = straightened(span)
    assert (straight.rows, straight.write, straight.extent) == (span.rows, span.write, span.extent)
    for row in range(span.rows):
        assert sorted(visible(straight, row)) == sorted(visible(span, row))


def test_only_chains_at_the_committed_end_are_straight() -> None:
    pages, write = [0], [8, 9, 10]
    chain = Span(pages, 8, 0, ([8], [9, 8], [10, 9, 8]), write)
    assert straightened(chain) == Span(pages, 11, 3, (), write)
    for nodes in (([8], [9], [10, 8]), ([9], [8, 9], [10, 8, 9]), ([9], [10, 9], [11, 10, 9])):
        tree = Span(pages, 8, 0, nodes, write)
        assert straightened(tree) is tree


def test_what_it_lacks_is_said() -> None:
    assert missing_for_flash(CPU, torch.bfloat16) == "FlashAttention needs CUDA, the device is cpu"
    assert "float32" in (missing_for_flash(torch.device("cuda"), torch.float32) or "")
    with pytest.raises(InvalidValue, match=r"attention_backend.*need sdpa: FlashAttention needs CUDA"):
        choose("flash", CPU, torch.bfloat16)
    with pytest.raises(InvalidValue, match=r"page_size.*multiple of 16"):
        FlashBackend(KVPool(1, 64, 1, 8, dtype=torch.bfloat16, device=CPU), 4, 1)
