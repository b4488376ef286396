"""What is kept of some positions, from the pages of another worker's pool straight into pages of this one; and a wait
for that to be there.

Knows planes of rows (keys or values of a layer, or features), pages, and addresses of memory that another process has
allocated and this one may read. Does not know sequences, how that memory came here, or whether it still says what it
did: who calls knows. Rows are copied as they are, of any dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from distspec.copies import integers
from distspec.kernels.pages import BITS

_ROWS = 16
_WARPS = 8
_PROGRAMS = 132
"""A link between GPUs is filled by some megabytes under way, NVLink 4 as well by so many programs as by a hundred times
as many; what computes meanwhile wants the multiprocessors too."""
_TURNS = 1 << 19
"""Of a wait. Each asks another device, and this one's host, a microsecond at least."""
Spots = tuple[Sequence[int], int, int]
"""Where positions that follow each other lie: pages in their order, the first one's place in the first page, and how
many places a page has."""


@triton.jit
def _pointer(address, like):
    # A tensor's memory begins so; told of nothing the compiler would load it value by value.
    return tl.multiple_of(address.to(like.dtype), 16)


@triton.jit
def _place(pages, row, offset, size, inside):
    at = row + offset
    return tl.load(pages + at // size, mask=inside, other=0) * size + at % size


@triton.jit(do_not_specialize=["their_data", "their_features", "held", "count", "places", "their_places", "offset",
                               "their_offset"])  # fmt: skip
def _kernel(data, features, their_data, their_features, pages, held, count, places, their_places, planes, width,
            feature_width, offset, size, their_offset, their_size,
            ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A program takes a few positions at a time, of every plane, or where there are more programs than that, of some;
    the plane behind all others is that of the features. pages: `held` of this pool, then the other's."""
    for run in range(tl.program_id(0), tl.cdiv(count, ROWS), tl.num_programs(0)):
        row = run * ROWS + tl.arange(0, ROWS)
        inside = row < count
        to = _place(pages, row, offset, size, inside)
        source = _place(pages + held, row, their_offset, their_size, inside)
        for index in range(tl.program_id(1), planes + (feature_width > 0), tl.num_programs(1)):
            plane = tl.cast(index, tl.int64)
            if plane < planes:
                mine, theirs = data + plane * places * width, _pointer(their_data, data) + plane * their_places * width
                values = width
            else:
                mine, theirs = features, _pointer(their_features, data)
                values = feature_width
            for start in range(0, values, BLOCK):
                lane = start + tl.arange(0, BLOCK)[None, :]
                mask = inside[:, None] & (lane < values)
                kept = tl.load(theirs + source[:, None] * values + lane, mask=mask)
                tl.store(mine + to[:, None] * values + lane, kept, mask=mask)


def pull_pages(
    data: Tensor, features: Tensor, spots: Spots, addresses: Sequence[int], places: int, theirs: Spots, count: int
) -> None:
    """Write `count` positions that lie at `theirs` in another pool to `spots` in this one.

    data: [layers, 2, places, kv_heads, head_dim]; features: [places, values], maybe none; both contiguous and of one
    dtype. addresses: of the other pool's data and, if there are any, features, as this one's but for the number of
    their places. Launched on the present stream; the other pool is read until that is done.
    """
    planes, width = data.shape[0] * data.shape[1], data.shape[3] * data.shape[4]
    if not count:
        return
    bits = BITS[data.dtype.itemsize]
    pages = integers([*spots[0], *theirs[0]], data.device)
    runs = min(triton.cdiv(count, _ROWS), _PROGRAMS)
    _kernel[(runs, min(planes + bool(features.shape[1]), _PROGRAMS // runs))](
        data.view(bits),
        features.view(bits),
        addresses[0],
        addresses[-1],
        pages,
        len(spots[0]),
        count,
        data.shape[2],
        places,
        planes,
        width,
        features.shape[1],
        *spots[1:],
        *theirs[1:],
        ROWS=_ROWS,
        BLOCK=min(1024, triton.next_power_of_2(width)),
        num_warps=_WARPS,
    )


@triton.jit(do_not_specialize=["counter", "count", "stop", "found", "turns"])
def _waiting(counter, count, stop, found, turns):
    at, stopped_at = counter.to(tl.pointer_type(tl.int64)), stop.to(tl.pointer_type(tl.int64))
    seen, stopped, turn = tl.load(at, volatile=True), tl.load(stopped_at, volatile=True), 0
    while (seen < count) & (stopped == 0) & (turn < turns):
        seen, stopped = tl.load(at, volatile=True), tl.load(stopped_at, volatile=True)
        turn += 1
    tl.store(found.to(tl.pointer_type(tl.int64)), seen)


def wait_for(counter: int, count: int, stop: Tensor, found: Tensor, turns: int = _TURNS) -> None:
    """Hold the present stream until the int64 at the address `counter`, of this device or another, is `count` at least,
    or the host writes to `stop`, or so many turns are over. found: what was there then.

    stop, found: int64 [1], pinned memory of the host. One program, of one warp.
    """
    _waiting[(1,)](counter, count, stop.data_ptr(), found.data_ptr(), turns, num_warps=1)
