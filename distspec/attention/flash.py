"""Attention by FlashAttention (arXiv 2205.14135; version 3, arXiv 2407.08608, on Hopper), as vLLM packages it.

Knows that package's call. Does not know which rows it serves, or why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from distspec.attention.available import flash_package
from distspec.attention.calls import CallingBackend, Part
from distspec.attention.nodes import NATURAL
from distspec.copies import integers
from distspec.errors import InvalidValue
from distspec.kv.pool import KVPool

_PAGES = 16
"""Page sizes are multiples of this: version 2 has no others."""


@dataclass(frozen=True, slots=True)
class _Call:
    """starts: int32 [spans + 1], where the rows of each span begin. lengths: int32 [spans], keys of each. tables: int32
    [spans, pages]. most_rows, most_keys: of a span."""

    starts: Tensor
    lengths: Tensor
    tables: Tensor
    most_rows: int
    most_keys: int
    causal: bool


class FlashBackend(CallingBackend[_Call]):
    """See AttentionBackend."""

    unit = NATURAL

    def __init__(self, pool: KVPool, page_size: int, num_heads: int) -> None:
        """Raises InvalidValue for a page size that the package does not take."""
        if page_size % _PAGES:
            raise InvalidValue("engine.page_size", page_size, f"a multiple of {_PAGES} for FlashAttention")
        super().__init__(pool, page_size, num_heads)
        self._function = _load()
        # Version 3 is for Hopper alone; whatever comes after it runs version 2.
        self._version = 3 if torch.cuda.get_device_capability(self._device)[0] == 9 else 2

    def _call(self, parts: Sequence[Part], causal: bool) -> _Call:
        counts = [-(-part.keys // self._page_size) for part in parts]
        tables = list[int]()
        for part, count in zip(parts, counts, strict=True):
            tables += part.span.pages[:count]
            tables += [0] * (max(counts) - count)
        return _Call(
            starts=self._ints(accumulate((part.span.rows for part in parts), initial=0)),
            lengths=self._ints(part.keys for part in parts),
            tables=self._ints(tables).view(len(parts), -1),
            most_rows=max(part.span.rows for part in parts),
            most_keys=max(part.keys for part in parts),
            causal=causal,
        )

    def _run(self, call: _Call, layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self._layers[layer]
        output, log_sums = self._function(
            q,
            keys,
            values,
            max_seqlen_q=call.most_rows,
            cu_seqlens_q=call.starts,
            max_seqlen_k=call.most_keys,
            seqused_k=call.lengths,
            block_table=call.tables,
            causal=call.causal,
            return_softmax_lse=True,
            fa_version=self._version,
        )
        return output, log_sums.t()

    def _ints(self, values: Iterable[int]) -> Tensor:
        return integers(list(values), self._device, torch.int32)


def _load() -> Callable[..., Any]:
    name = flash_package()
    if name is None:
        raise ImportError("neither vllm.vllm_flash_attn nor vllm_flash_attn is installed")
    function: Callable[..., Any] = import_module(name).flash_attn_varlen_func
    return function
