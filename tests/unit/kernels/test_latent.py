"""The kernel between the products of latent attention, against plain torch; tests/gpu runs the same check compiled."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distspec.kernels.latent import turn_and_write_latents, turn_and_write_latents_reference
from tests.unit.kernels.test_elementwise import CPU, ROWS, close

pytestmark = pytest.mark.needs("interpreter")


def check_latents(
    rows: int, heads: int, rank: int, dim: int, device: torch.device, dtype: torch.dtype, plain_dim: int = 6
) -> None:
    """Queries, what is written, and that nothing else is; the last row of several writes nothing. Parts come as views
    of the products that they are parts of."""
    places = 3 * rows + 5
    angle = torch.randn(rows, 1, dim // 2).repeat(1, 1, 2)
    rope = torch.stack((angle.cos(), angle.sin())).to(device, dtype)
    rope[1, :, :, : dim // 2] *= -1
    plain = torch.randn(heads, rows, rank).to(device, dtype)
    turned = torch.randn(rows, heads, plain_dim + dim).to(device, dtype)[..., plain_dim:]
    latents = torch.randn(rows, 10 + rank + dim).to(device, dtype)[:, 10:]
    norm = (1 + 0.1 * torch.randn(rank)).to(device, dtype)
    write = torch.randperm(places)[:rows].to(device)
    if rows > 1:
        write[-1] = -1
    pools = [torch.full((places, 1, rank + dim), 7.0, device=device, dtype=dtype) for _ in range(2)]
    got, want = (
        compute(plain, turned, latents, norm, rope, write, keys, scale=0.7, eps=1e-6)
        for compute, keys in zip((turn_and_write_latents, turn_and_write_latents_reference), pools, strict=True)
    )
    close(got / 3, want / 3)
    close(pools[0] / 3, pools[1] / 3)
    untouched = torch.ones(places, dtype=torch.bool, device=device)
    untouched[write[write >= 0]] = False
    assert bool((pools[0][untouched] == 7).all())


def check_latents_are_numbers(device: torch.device, dtype: torch.dtype) -> None:
    """As keys and values, see test_elementwise.py."""
    rank, dim = 16, 4
    latents = torch.randn(3, rank + dim)
    latents[0, ::3], latents[0, 1::3], latents[1, ::2] = torch.nan, torch.inf, torch.finfo(dtype).max
    latents, rope = latents.to(device, dtype), torch.ones(2, 3, 1, dim, device=device, dtype=dtype)
    keys = torch.zeros(3, 1, rank + dim, device=device, dtype=dtype)
    turn_and_write_latents(
        torch.randn(2, 3, rank, device=device, dtype=dtype),
        torch.randn(3, 2, dim, device=device, dtype=dtype),
        latents,
        torch.ones(rank, device=device, dtype=dtype),
        rope,
        torch.arange(3, device=device),
        keys,
        scale=1.0,
        eps=1e-6,
    )
    assert bool(keys.isfinite().all())
    assert bool((keys[2] != 0).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what is asked for here
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pages_hold_numbers_whatever_a_model_computes(dtype: torch.dtype) -> None:
    check_latents_are_numbers(CPU, dtype)


@settings(max_examples=15)
@given(ROWS, st.sampled_from([1, 3, 8, 20]), st.sampled_from([(16, 4), (20, 12), (512, 64)]))
def test_latents_and_their_queries(rows: int, heads: int, dims: tuple[int, int]) -> None:
    check_latents(rows, heads, *dims, CPU, torch.float32)
