"""What is kept of some positions, from their pages into one piece of memory for a wire, and back.

Knows planes of rows (keys or values of a layer, or features) and locations. Does not know sequences, or where the piece
goes. What it does in plain torch, `KVPool.gather` and `KVPool.scatter` say. Rows are copied as they are, of any dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 4
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["count"])
def _kernel(data, features, locations, content, count, places, planes, width, feature_width,
            GATHER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One program for a few positions of one plane; the plane behind all others is that of the features."""
    row, plane = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    inside = (row < count)[:, None]
    location = tl.load(locations + row, mask=row < count, other=0)
    if plane < planes:
        pages, size = data + plane * places * width, width
    else:
        pages, size = features, feature_width
    piece = content + plane * count * width
    for start in range(0, size, BLOCK):
        lane = start + tl.arange(0, BLOCK)[None, :]
        mask = inside & (lane < size)
        paged, dense = pages + location[:, None] * size + lane, piece + row[:, None] * size + lane
        if GATHER:
            tl.store(dense, tl.load(paged, mask=mask), mask=mask)
        else:
            tl.store(paged, tl.load(dense, mask=mask), mask=mask)


def gather_pages(data: Tensor, features: Tensor, locations: Tensor) -> Tensor:
    """A copy of what lies at some locations: all planes of data, one after the other, then the features.

    data: [layers, 2, places, kv_heads, head_dim]; features: [places, values], maybe none; both contiguous and of one
    dtype. locations: int64 [n]. Returns [n * (layers * 2 * kv_heads * head_dim + values)].
    """
    row = data.numel() // data.shape[2] + features.shape[1]
    content = data.new_empty(len(locations) * row)
    _launch(data, features, locations, content, gather=True)
    return content


def scatter_pages(data: Tensor, features: Tensor, locations: Tensor, content: Tensor) -> None:
    """Write what `gather_pages` returned, for tensors of these planes, to other locations, no two of them the same."""
    _launch(data, features, locations, content, gather=False)


def _launch(data: Tensor, features: Tensor, locations: Tensor, content: Tensor, gather: bool) -> None:
    planes, width = data.shape[0] * data.shape[1], data.shape[3] * data.shape[4]
    if not len(locations):
        return
    bits = BITS[data.dtype.itemsize]
    _kernel[(triton.cdiv(len(locations), _ROWS), planes + bool(features.shape[1]))](
        data.view(bits),
        features.view(bits),
        locations,
        content.view(bits),
        len(locations),
        data.shape[2],
        planes,
        width,
        features.shape[1],
        GATHER=gather,
        ROWS=_ROWS,
        BLOCK=min(1024, triton.next_power_of_2(width)),
    )
