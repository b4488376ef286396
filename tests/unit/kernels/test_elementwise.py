"""Norm, activation and rotary kernels against plain torch; tests/gpu runs the same checks compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.kernels.activation import silu_mul, silu_mul_reference
from distspec.kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from distspec.kernels.rope import HeadNorms, rope_and_write, rope_and_write_reference

pytestmark = pytest.mark.needs("interpreter")
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative to values of about 1; half precision keeps 8 bits, and plain torch rounds more often than a kernel."""
ROWS = st.integers(1, 5)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    bound = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, atol=bound, rtol=bound)


def check_norm(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
    x, delta = torch.randn(2, rows, width).to(device, dtype)
    weight = (1 + 0.1 * torch.randn(width)).to(device, dtype)
    close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    total, normed = add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    close(normed, add_rms_norm_reference(x, delta, weight, 1e-5)[1])


def check_silu(rows: int, inner: int, device: torch.device, dtype: torch.dtype) -> None:
    gate_up = torch.randn(rows, 2 * inner).to(device, dtype)
    close(silu_mul(gate_up), silu_mul_reference(gate_up))


def check_rope(
    rows: int, heads: tuple[int, int], dim: int, normed: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Queries, what is written, and that nothing else is; the last row of several writes nothing."""
    count, kv_heads = heads
    places, longest = 3 * rows + 5, 40
    table = torch.randn(2, longest, dim)
    table[:, :, : dim // 2] = table[:, :, dim // 2 :]
    table[1, :, : dim // 2] *= -1
    qkv = torch.randn(rows, (count + 2 * kv_heads) * dim).to(device, dtype)
    positions = torch.randint(longest, (rows,)).to(device)
    write = torch.randperm(places)[:rows].to(device)
    if rows > 1:
        write[-1] = -1
    gains = (1 + 0.1 * torch.randn(2, dim)).to(device, dtype)
    norms = HeadNorms(gains[0], gains[1], eps=1e-6) if normed else None
    pools = [torch.full((2, places, kv_heads, dim), 7.0, device=device, dtype=dtype) for _ in range(2)]
    table = table.to(device, dtype)
    got = rope_and_write(qkv, table, positions, write, pools[0][0], pools[0][1], norms)
    want = rope_and_write_reference(qkv, table, positions, write, pools[1][0], pools[1][1], norms)
    close(got / 3, want / 3)
    close(pools[0] / 3, pools[1] / 3)
    untouched = torch.ones(places, dtype=torch.bool, device=device)
    untouched[write[write >= 0]] = False
    assert bool((pools[0][:, untouched] == 7).all())


def check_rope_writes_numbers(device: torch.device, dtype: torch.dtype) -> None:
    """Rows of a model that overflows leave nothing behind in pages that others will have; their queries are their own
    matter, and the rows beside them what they are alone."""
    kv_heads, dim = 2, 8
    qkv = torch.randn(3, 4 * kv_heads * dim)
    qkv[0, ::3], qkv[0, 1::3], qkv[1, ::2] = torch.nan, torch.inf, torch.finfo(dtype).max
    table, where = (torch.ones(2, 4, dim, device=device, dtype=dtype), torch.arange(3, device=device))
    keys, values = torch.zeros(2, 3, kv_heads, dim, device=device, dtype=dtype)
    got = rope_and_write(qkv.to(device, dtype), table, where, where, keys, values)
    assert bool(keys.isfinite().all())
    assert bool(values.isfinite().all())
    alone = torch.zeros(2, 1, kv_heads, dim, device=device, dtype=dtype)
    same = rope_and_write(qkv[2:].to(device, dtype), table, where[2:], where[:1], *alone)
    assert torch.equal(torch.stack((keys[2:], values[2:])), alone)
    assert torch.equal(got[2:], same)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what is asked for here
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pages_hold_numbers_whatever_a_model_computes(dtype: torch.dtype) -> None:
    check_rope_writes_numbers(CPU, dtype)


@settings(max_examples=15)
@given(ROWS, st.integers(1, 200))
def test_norms(rows: int, width: int) -> None:
    check_norm(rows, width, CPU, torch.float32)


@settings(max_examples=10)
@given(ROWS, st.sampled_from([1, 24, 1030]))
def test_silu(rows: int, inner: int) -> None:
    check_silu(rows, inner, CPU, torch.float32)


@settings(max_examples=15)
@given(ROWS, st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 1)]), st.sampled_from([2, 8, 12, 64]), st.booleans())
def test_rotary_and_pages(rows: int, heads: tuple[int, int], dim: int, normed: bool) -> None:
    check_rope(rows, heads, dim, normed, CPU, torch.float32)
