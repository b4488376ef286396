"""Attention by FlashInfer (arXiv 2501.01005): keys and values of heads, or latents that all heads share.

Knows that package's wrappers, and which of its kernels is for what. Does not know which rows they serve, or why. The
package compiles a kernel when it is first planned for, with nvcc, unless its cache has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from distspec.attention.calls import CallingBackend, Part
from distspec.errors import InvalidValue
from distspec.kv.pool import KVPool

_DIMS = (64, 128, 256)
_LATENT = (512, 64)
"""What it has kernels for: numbers of a head; of a latent's value and of its rotary part."""

_WORKSPACE = 128 * 2**20
"""Bytes for results of splits, at least; what the package recommends."""

_TILE = 128
"""Rows of a program, at most. Those of version 3 are of one head, and it neither splits walks nor shares keys among
heads of a group: it is for chunks of prompts. Version 2 does both."""

_PROGRAMS = 2
"""Of version 2 on a multiprocessor, among which walks are split."""

_ALIGNMENT = 1024
"""Bytes that parts of the workspace may lie apart."""


class _Wrapper:
    """One of the package's, which holds a single plan."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._copied: torch.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def plan(self, *sizes: Any, **options: Any) -> None:
        # The plan is copied from pinned memory, which must have been read before it is written again.
        self._copied.synchronize()
        self._wrapper.plan(*sizes, **options)
        self._copied.record()

    def run(self, *tensors: Any, out: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._wrapper.run(*tensors, out=out, return_lse=True)
        return found


class FlashInferBackend(CallingBackend[_Wrapper]):
    """See AttentionBackend. A plan is good until the next one is made."""

    unit = 1.0

    def __init__(self, pool: KVPool, page_size: int, num_heads: int) -> None:
        """Raises InvalidValue for heads or latents that the package has no kernel for."""
        dim, latent = pool.data.shape[-1], pool.latent
        if latent and (latent, dim - latent) != _LATENT:
            need = f"mla: FlashInfer reads latents of {_LATENT} numbers, not {latent, dim - latent}"
            raise InvalidValue("engine.attention_backend", "flashinfer", need)
        if not latent and dim not in _DIMS:
            need = f"sdpa or triton: FlashInfer reads heads of {_DIMS} numbers, not {dim}"
            raise InvalidValue("engine.attention_backend", "flashinfer", need)
        super().__init__(pool, page_size, num_heads)
        self._heads = num_heads
        self._hopper = torch.cuda.get_device_capability(self._device)[0] == 9
        processors = torch.cuda.get_device_properties(self._device).multi_processor_count
        size = max(_WORKSPACE, 0 if latent else split_bytes(num_heads, pool.data.shape[-2], dim, processors))
        self._workspace = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._wrappers: dict[tuple[str, bool], _Wrapper] = {}

    def _call(self, parts: Sequence[Part], causal: bool) -> _Wrapper:
        counts = [-(-part.keys // self._page_size) for part in parts]
        rows = _ints(accumulate((part.span.rows for part in parts), initial=0))
        begins = _ints(accumulate(counts, initial=0))
        pages = _ints(page for part, count in zip(parts, counts, strict=True) for page in part.span.pages[:count])
        heads, dim, dtype = *self._pool.data.shape[-2:], self._pool.data.dtype
        if self._pool.latent:
            wrapper = self._wrapper("fa3" if self._hopper else "fa2", causal)
            lengths = _ints(part.keys for part in parts)
            scores = causal, dim**-0.5, dtype, dtype
            wrapper.plan(rows, begins, pages, lengths, self._heads, *_LATENT, self._page_size, *scores)
        else:
            wide = max(part.span.rows for part in parts) >= _TILE
            wrapper = self._wrapper("fa3" if self._hopper and wide else "fa2", causal)
            last = _ints((part.keys - 1) % self._page_size + 1 for part in parts)
            sizes = self._heads, heads, dim, self._page_size
            wrapper.plan(rows, begins, pages, last, *sizes, causal=causal, q_data_type=dtype)
        return wrapper

    def _run(self, call: _Wrapper, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._layers[layer]
        out = torch.empty(*q.shape[:2], values.shape[-1], dtype=q.dtype, device=q.device)
        if not self._pool.latent:
            return call.run(q, (keys, values), out=out)
        latent, keys = self._pool.latent, keys[:, :, 0]
        return call.run(q[..., :latent], q[..., latent:], keys[..., :latent], keys[..., latent:], out=out)

    def _wrapper(self, version: str, causal: bool) -> _Wrapper:
        """A step needs one of either kind, and no more."""
        found = self._wrappers.get((version, causal))
        if found is None:
            found = _Wrapper(_kind(self._pool.latent > 0)(self._workspace, backend=version))
            self._wrappers[version, causal] = found
        return found


def split_bytes(heads: int, kv_heads: int, dim: int, processors: int) -> int:
    """What version 2 takes of its workspace at most: a float32 result and a log-sum for each row and head of all tiles
    that it splits a step into. It fails where that does not fit."""
    tiles = -(-_PROGRAMS * processors // kv_heads)
    return heads * tiles * _TILE * (dim + 1) * 4 + _ALIGNMENT


def _kind(latent: bool) -> Callable[..., Any]:
    if latent:
        of_latents: Callable[..., Any] = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
        return of_latents
    of_heads: Callable[..., Any] = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    return of_heads


def _ints(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32)
