"""The tensors of the KV cache.

Knows locations (page * page_size + offset) and layers. Does not know which sequence a location belongs to.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """Keys and values of every layer.

    data: [layers, 2, locations, kv_heads, head_dim]; layers[i] is (keys, values) of one layer, views of data.
    Locations are given as int64 [n] on the pool's device.
    """

    def __init__(
        self, layers: int, locations: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Zeros, not garbage: a masked position still enters the weighted sum, and 0 * NaN is NaN.
        self.data = torch.zeros(layers, 2, locations, kv_heads, head_dim, dtype=dtype, device=device)
        self.layers: list[tuple[Tensor, Tensor]] = [(layer[0], layer[1]) for layer in self.data]

    @staticmethod
    def position_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one position takes in all layers."""
        return layers * 2 * kv_heads * head_dim * dtype.itemsize

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy what lies at `sources` to `destinations`, all at once, so that locations may swap."""
        self.data.index_copy_(2, destinations, self.data.index_select(2, sources))

    def gather(self, locations: Tensor) -> Tensor:
        """[layers, 2, n, kv_heads, head_dim]: a copy of what lies there."""
        return self.data.index_select(2, locations)

    def scatter(self, locations: Tensor, content: Tensor) -> None:
        """Write what `gather` returned, here or elsewhere."""
        self.data.index_copy_(2, locations, content.to(self.data.device, self.data.dtype))
