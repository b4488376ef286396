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


@settings(max_examples=15)
@given(ROWS, st.sampled_from([1, 3, 8, 20]), st.sampled_from([(16, 4), (20, 12), (512, 64)]))
def test_latents_and_their_queries(rows: int, heads: int, dims: tuple[int, int]) -> None:
    check_latents(rows, heads, *dims, CPU, torch.float32)
