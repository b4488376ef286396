"""The tensors of the KV cache.

Knows locations (page * page_size + offset), layers and features. Does not know which sequence a location belongs to,
or what its features are for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec import Struct, structs
from torch import Tensor

from distspec.kv.sequence import Spots


class Layout(Struct, frozen=True):
    """What two pools must have alike for one to read the other, and `places`, which may differ."""

    places: int
    planes: int
    width: int
    features: int
    dtype: str

    def fits(self, other: Layout) -> bool:
        return structs.replace(self, places=other.places) == other


class KVPool:
    """Keys and values of every layer and, where a drafter will want them, features: all that is kept of a position.

    data: [layers, 2, locations + 1, kv_heads, head_dim]; layers[i] is (keys, values) of one layer, views of data.
    latent: values are the first so many numbers of a key, as latent attention has them (DeepSeek-V2, arXiv 2405.04434),
    and data is [layers, 1, ...]; 0: they are tensors of their own.
    features: [locations + 1, values]; takes no memory where there are none. width: values of one position, of both.
    Locations are given as int64 [n] on the pool's device. spare: one that belongs to no page, behind all others, where
    rows that only pad a step write.
    """

    def __init__(
        self,
        layers: int,
        locations: int,
        kv_heads: int,
        head_dim: int,
        *,
        latent: int = 0,
        features: int = 0,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Zeros, not garbage: a masked position still enters the weighted sum, and 0 * NaN is NaN.
        planes = 1 if latent else 2
        self.data = torch.zeros(layers, planes, locations + 1, kv_heads, head_dim, dtype=dtype, device=device)
        self.features = torch.zeros(locations + 1, features, dtype=dtype, device=device)
        self.latent = latent
        self.spare = locations
        self.width = layers * planes * kv_heads * head_dim + features
        self.layers: list[tuple[Tensor, Tensor]] = [
            (layer[0], layer[0, ..., :latent] if latent else layer[1]) for layer in self.data
        ]

    @staticmethod
    def position_bytes(
        layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, features: int = 0, latent: int = 0
    ) -> int:
        """Bytes that one position takes in all layers, with its features."""
        return (layers * (1 if latent else 2) * kv_heads * head_dim + features) * dtype.itemsize

    @property
    def layout(self) -> Layout:
        layers, planes, places, kv_heads, head_dim = self.data.shape
        return Layout(places, layers * planes, kv_heads * head_dim, self.features.shape[1], str(self.data.dtype))

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """What others may read; as long as this pool lives."""
        return (self.data, self.features) if self.features.numel() else (self.data,)

    def pull(self, spots: Spots, addresses: Sequence[int], layout: Layout, theirs: Spots, count: int) -> None:
        """Write what lies at `theirs` in the pool of another process, whose `memory` has these addresses here and whose
        layout fits, to spots of this one. One kernel of the present stream, which reads both."""
        from distspec.kernels.pull import pull_pages  # imports Triton

        pull_pages(self.data, self.features, spots, addresses, layout.places, theirs, count)

    def move(self, sources: Tensor, destinations: Tensor) -> None:
        """Copy what lies at `sources` to `destinations`, all at once, so that locations may swap."""
        self.data.index_copy_(2, destinations, self.data.index_select(2, sources))
        if self.features.numel():
            self.features.index_copy_(0, destinations, self.features.index_select(0, sources))

    def gather(self, locations: Tensor) -> Tensor:
        """A copy of what lies there, in one piece for a wire, [n * width]: the KV of all as data is, [layers, 2 or 1,
        n, kv_heads, head_dim], then their features as [n, values]. On a GPU by one kernel."""
        if self.data.is_cuda:
            from distspec.kernels.pages import gather_pages  # imports Triton

            return gather_pages(self.data, self.features, locations)
        kv = self.data.index_select(2, locations).flatten()
        return torch.cat((kv, self.features.index_select(0, locations).flatten())) if self.features.numel() else kv

    def scatter(self, locations: Tensor, content: Tensor) -> None:
        """Write what `gather` returned, in this pool or one like it."""
        if self.data.is_cuda:
            from distspec.kernels.pages import scatter_pages  # imports Triton

            scatter_pages(self.data, self.features, locations, content.to(self.data))
            return
        layers, planes, _, kv_heads, head_dim = self.data.shape
        content = content.to(self.data.device, self.data.dtype)
        end = content.numel() - len(locations) * self.features.shape[1]
        self.data.index_copy_(2, locations, content[:end].view(layers, planes, -1, kv_heads, head_dim))
        if end < content.numel():
            self.features.index_copy_(0, locations, content[end:].view(len(locations), -1))
