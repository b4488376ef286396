"""What FlashAttention is asked for, and where it is refused; what the package itself computes is tested on a GPU."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.attention import Span, choose, flash
from distspec.attention.available import missing_for_flash
from distspec.attention.calls import straightened
from distspec.attention.flash import FlashBackend
from distspec.errors import InvalidValue
from distspec.kv.pool import KVPool
from tests.unit.attention.test_sdpa import CPU, compare, random_span, visible


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


def written_out(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    block_table: torch.Tensor,
    causal: bool,
    return_softmax_lse: bool,
    fa_version: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The package's call, as it documents it. keys, values: [pages, page_size, kv_heads, dim]."""
    assert return_softmax_lse
    assert fa_version == 3
    out, sums = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    starts = cu_seqlens_q.tolist()
    for first, end, count, pages in zip(starts, starts[1:], seqused_k.tolist(), block_table, strict=False):
        assert end - first <= max_seqlen_q
        assert 0 < count <= max_seqlen_k
        k, v = (x[pages].flatten(0, 1)[:count] for x in (keys, values))
        out[first:end], sums[:, first:end] = one_span(q[first:end], k, v, causal)
    return out, sums


def one_span(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Results [rows, heads, dim] and log-sums [heads, rows]; causal: the last row sees all keys."""
    (rows, heads, dim), count = q.shape, len(k)
    k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("rhd,khd->hrk", q, k) * dim**-0.5
    if causal:
        scores += torch.full_like(scores, -torch.inf).triu(count - rows + 1)
    return torch.einsum("hrk,khd->rhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.needs("interpreter")
@settings(max_examples=20)
@given(
    st.integers(0, 2**32), st.sampled_from([16, 64]), st.lists(st.sampled_from([1, 2, 6, 20]), min_size=1, max_size=4)
)
def test_rows_see_their_path_and_nothing_else(seed: int, page_size: int, sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "_load", lambda: written_out)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        compare(FlashBackend, seed, page_size, (6, 2), sizes, CPU, torch.float32)


def test_what_it_lacks_is_said() -> None:
    assert missing_for_flash(CPU, torch.bfloat16) == "FlashAttention needs CUDA, the device is cpu"
    assert "float32" in (missing_for_flash(torch.device("cuda"), torch.float32) or "")
    with pytest.raises(InvalidValue, match=r"attention_backend.*need sdpa: FlashAttention needs CUDA"):
        choose("flash", CPU, torch.bfloat16)
    with pytest.raises(InvalidValue, match=r"page_size.*multiple of 16"):
        FlashBackend(KVPool(1, 64, 1, 8, dtype=torch.bfloat16, device=CPU), 4, 1)
