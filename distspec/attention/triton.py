"""Attention by our own Triton kernel: decode tokens, verify trees and prefill chunks in one kind of call.

Knows how spans become the integers that the kernel reads, and where these lie. Does not know why a row sees what it
sees. A plan is one array of integers whose places depend only on a bucket's sizes, so that a captured step can read
the next plan from the same buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from distspec import copies
from distspec.attention import kernels, tiles
from distspec.attention.base import Bucket, Places, Span
from distspec.attention.tiles import FIELDS, Grid
from distspec.kernels.launch import early
from distspec.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class _Shape:
    """How programs of so many rows x query heads of a group (`lanes`) run. block: keys read at once; warps; stages:
    blocks on their way; resident: programs that share a multiprocessor, so that one computes while another waits for
    its keys; together: splits that a merge waits for at once; width: numbers of a row that it merges at once, 0: all;
    shared: block and stages of programs that share a multiprocessor, where there are more of them than of those.
    """

    lanes: int
    block: int
    warps: int
    stages: int
    resident: int
    together: int
    width: int = 0
    shared: tuple[int, int] | None = None


_HALF = (
    _Shape(16, 128, 4, 3, 1, 8, shared=(64, 4)),
    _Shape(32, 128, 4, 3, 1, 4, shared=(64, 4)),
    _Shape(64, 64, 4, 3, 2, 2),
    _Shape(128, 128, 8, 3, 1, 2),
)
"""A program of few rows waits for keys alone: longer blocks on their way, and a multiprocessor for itself. Where there
are more programs than that, each start is a wait, which another program should fill: two share one. 128 lanes are best
where arithmetic binds; for a single tree they leave multiprocessors idle. Figures: docs/performance.md."""

_FULL = (_Shape(16, 32, 4, 1, 2, 8), _Shape(32, 32, 4, 1, 2, 4))
"""In ieee precision there are no tensor cores, and a wide tile would not fit the registers."""

_LATENT_HALF = (
    _Shape(16, 32, 4, 2, 2, 4, 128),
    _Shape(32, 32, 8, 2, 1, 4, 128),
    _Shape(64, 64, 8, 2, 1, 4, 128),
)
_LATENT_FULL = (_Shape(16, 16, 4, 1, 1, 4, 128), _Shape(32, 16, 8, 1, 1, 4, 128))
"""For latents of 512 + 64 numbers: 64 lanes take half the registers of a multiprocessor for their sums alone, and with
two blocks of 64 latents nearly all of its shared memory. Compiled for Hopper, no walk over whole blocks spills
registers; the last block of 64 lanes, which is masked, does. Not measured yet."""

_SHAPES: dict[tuple[bool, bool], tuple[_Shape, ...]] = {
    (False, False): _HALF,
    (False, True): _FULL,
    (True, False): _LATENT_HALF,
    (True, True): _LATENT_FULL,
}
"""By whether pages hold latents, and whether they are float32."""

_OTHER_BYTES = 3072
"""Of shared memory, for what a program holds beside queries, keys and values."""

_CPU_PROCESSORS = 3
"""In the interpreter, where splitting is only of use to tests."""


@dataclass(frozen=True, slots=True)
class _Launch:
    """items: int64 [n, FIELDS]. lanes: rows x heads of a program. tiles: of which the items are splits, at most."""

    items: Tensor
    lanes: int
    tiles: int


@dataclass(frozen=True, slots=True)
class Plan:
    """write: int64 [rows], where keys and values go. limits: int64 [rows]; masks: int64 [rows * words]; pages: int64,
    the page tables of the spans one after the other."""

    write: Tensor
    limits: Tensor
    masks: Tensor
    pages: Tensor
    words: int
    launches: tuple[_Launch, ...]


class TritonBackend:
    """See AttentionBackend, StaticPlans and DevicePlans."""

    def __init__(self, pool: KVPool, page_size: int, num_heads: int) -> None:
        kv_heads, key_dim = pool.data.shape[-2:]
        full = pool.data.dtype == torch.float32
        shapes = _SHAPES[pool.latent > 0, full]
        self._groups = tiles.groups(num_heads, shapes[-1].lanes) if pool.latent else kv_heads
        self._pool = pool
        self._page_size = page_size
        self._group = num_heads // self._groups
        self._device = pool.data.device
        self._dim = pool.latent or key_dim
        self._rest = key_dim - self._dim
        self._pad, self._rest_pad = (max(16, triton.next_power_of_2(n)) for n in (self._dim, self._rest))
        most = replace(shapes[-1], lanes=max(shapes[-1].lanes, int(triton.next_power_of_2(self._group))))
        fitting = [self._fitted(shape) for shape in (*shapes[:-1], most) if shape.lanes >= self._group]
        self._shapes = {shape.lanes: shape for shape in fitting}
        self._precision = "ieee" if full else "tf32"  # of half-precision operands it changes nothing
        self._offset = triton.language.int32 if pool.layers[0][0].numel() < 2**31 else triton.language.int64
        cuda = self._device.type == "cuda"
        count = torch.cuda.get_device_properties(self._device).multi_processor_count if cuda else 0
        self._processors = count or _CPU_PROCESSORS
        places = max(self._grid(lanes).programs for lanes in self._shapes)
        shape = (places, self._groups, max(self._shapes))
        self._partial = torch.empty(*shape, self._pad, dtype=torch.float32, device=self._device)
        self._sums = torch.empty(shape, dtype=torch.float32, device=self._device)
        self._counts = torch.zeros(shape[:2], dtype=torch.int32, device=self._device)

    # -- plans -----------------------------------------------------------------------------------

    def plan(self, spans: Sequence[Span]) -> Plan:
        rows, words = sum(span.rows for span in spans), tiles.words(spans)
        groups: dict[int, list[Span]] = {}
        for span in spans:
            groups.setdefault(self._lanes_for(span.rows, rows), []).append(span)
        pages, starts = tiles.tables(spans, self._page_size)
        sizes, counts = [rows, rows, rows * words], []
        integers = tiles.common(spans, rows, words, spare=self._pool.spare)
        for lanes in groups:
            own = [self._lanes_for(span.rows, rows) == lanes for span in spans]
            found = self._work(spans, starts, lanes, own)
            integers += found
            sizes.append(len(found))
            counts.append(found[8::FIELDS].count(0))  # first splits
        integers += pages
        device = copies.integers(integers, self._device)
        write, limits, masks, *items, table = device.split_with_sizes([*sizes, len(pages)])
        each = zip(items, groups, counts, strict=True)
        launches = tuple(_Launch(part.view(-1, FIELDS), lanes, count) for part, lanes, count in each)
        return Plan(write, limits, masks, table, words, launches)

    def buckets(self, rows: int, scratch: int) -> list[Bucket]:
        words = tiles.words_for(scratch)
        narrow, wide = self._lanes_for(1, rows), self._lanes_for(rows, rows)
        return [Bucket(rows, words, lanes) for lanes in self._shapes if narrow <= lanes <= wide]

    def bucket(self, spans: Sequence[Span], rows: int, scratch: int) -> Bucket | None:
        words = tiles.words_for(scratch)
        if tiles.words(spans) > words:
            return None
        return Bucket(rows, words, self._lanes_for(max(span.rows for span in spans), rows))

    def lay_out(self, spans: Sequence[Span], bucket: Bucket) -> list[int]:
        pages, starts = tiles.tables(spans, self._page_size)
        out = tiles.common(spans, bucket.rows, bucket.words, spare=self._pool.spare)
        found = self._work(spans, starts, bucket.kind, [True] * len(spans))
        out += found
        out += [0] * (self._items(bucket) * FIELDS - len(found))
        out += pages
        return out

    def bind(self, integers: Tensor, bucket: Bucket) -> Plan:
        """integers: int64 [n] as `lay_out` orders them: where rows write [rows], their limits [rows], their masks
        [rows * words], items [items * FIELDS], and page numbers, which are the rest. The plan has views of them."""
        rows, items = bucket.rows, self._items(bucket) * FIELDS
        sizes = [rows, rows, rows * bucket.words, items]
        write, limits, masks, found, pages = integers.split_with_sizes([*sizes, len(integers) - sum(sizes)])
        return Plan(write, limits, masks, pages, bucket.words, (_Launch(found.view(-1, FIELDS), bucket.kind, rows),))

    def chains(self, places: Places, count: int) -> Plan:
        return self._dealt(places, count, self._lanes_for(count, len(places.rows) * count), stepwise=False)[0]

    def steps(self, places: Places, count: int) -> list[Plan]:
        return self._dealt(places, count, self._lanes_for(1, len(places.rows)), stepwise=True) if count else []

    def _dealt(self, places: Places, count: int, lanes: int, *, stepwise: bool) -> list[Plan]:
        grid, (texts, width), rows = self._grid(lanes), places.tables.shape, len(places.rows)
        parts = 1 if stepwise else -(-count // grid.rows)
        write, limits = torch.empty(2, rows * count, dtype=torch.int64, device=self._device)
        items = torch.empty(rows * parts + grid.programs, FIELDS, dtype=torch.int64, device=self._device)
        kernels.deal[(len(items),)](
            places.tables, places.lengths, places.rows, write, limits, items, places.offset, rows, width, count,
            texts - 1, self._pool.spare, grid.programs,
            PAGE=self._page_size, TILE=grid.rows, PARTS=parts, BLOCK=grid.block,
            TILES=triton.next_power_of_2(rows * parts), COUNT=triton.next_power_of_2(count), STEPWISE=stepwise,
            **early(),
        )  # fmt: skip
        # Nothing lies above the committed end: no mask is read.
        launch, pages = (_Launch(items, lanes, rows * parts),), places.tables.view(-1)
        each = rows if stepwise else rows * count
        return [
            Plan(*step, limits, pages, 1, launch) for step in zip(write.split(each), limits.split(each), strict=True)
        ]

    # -- the call --------------------------------------------------------------------------------

    def read(self, plan: Plan, layer: int, q: Tensor) -> Tensor:
        """q: [rows, heads, key_dim], contiguous along key_dim. Returns [rows, heads * dim] in its dtype."""
        keys, values = self._pool.layers[layer]
        out = torch.empty(q.shape[0], q.shape[1] * self._dim, dtype=q.dtype, device=q.device)
        for launch in plan.launches:
            shape = self._shapes[launch.lanes]
            block, stages = self._blocks(launch)
            kernels.attend[len(launch.items), self._groups](
                q, keys, values, out, launch.items, plan.pages, plan.limits, plan.masks,
                self._partial, self._sums, self._counts, q.stride(0), q.stride(1), plan.words,
                (self._dim + self._rest) ** -0.5 * math.log2(math.e),
                GROUPS=self._groups, GROUP=self._group, DIM=self._dim, DIM_PAD=self._pad, REST=self._rest,
                REST_PAD=self._rest_pad, PAGE=self._page_size, M=shape.lanes, N=block, LAST=min(block, 64),
                WIDTH=min(self._pad, shape.width or self._pad), TOGETHER=shape.together, STAGES=stages,
                PRECISION=self._precision, OFFSET=self._offset, **early(),
                num_warps=shape.warps,
            )  # fmt: skip
        return out

    # -- helpers ---------------------------------------------------------------------------------

    def _lanes_for(self, rows: int, total: int) -> int:
        """The least that holds so many rows of one span, or the most there is; the widest only in steps whose rows in
        all give every other multiprocessor one such program."""
        heads, (*narrower, widest) = self._group * self._groups, self._shapes
        if narrower and 2 * total * heads < widest * self._processors:
            widest = narrower[-1]
        return next((lanes for lanes in narrower if rows * self._group <= lanes), widest)

    def _blocks(self, launch: _Launch) -> tuple[int, int]:
        """Block and stages."""
        shape = self._shapes[launch.lanes]
        if shape.shared and launch.tiles * self._groups > self._processors:
            return shape.shared
        return shape.block, shape.stages

    def _fitted(self, shape: _Shape) -> _Shape:
        """With fewer stages, or smaller blocks, where a multiprocessor's memory is too small for its queries, and for
        the keys and values, or latents, of each stage."""
        if self._device.type != "cuda":
            return shape
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        room = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"] - _OTHER_BYTES
        row = (self._pad + (self._rest_pad if self._rest else 0)) * self._pool.data.element_size()
        planes = self._pool.data.shape[1]
        while row * (shape.lanes + planes * shape.stages * shape.block) > room and (
            shape.stages > 1 or shape.block > 16
        ):
            less = {"stages": shape.stages - 1} if shape.stages > 1 else {"block": shape.block // 2}
            shape = replace(shape, **less, shared=None)
        return shape

    def _grid(self, lanes: int) -> Grid:
        shape = self._shapes[lanes]
        programs = self._processors * shape.resident // self._groups
        return Grid(rows=lanes // self._group, block=shape.block, programs=max(1, programs))

    def _items(self, bucket: Bucket) -> int:
        """Room for the items of any spans that the bucket holds: see tiles.items."""
        return bucket.rows + self._grid(bucket.kind).programs

    def _work(self, spans: Sequence[Span], starts: Sequence[int], lanes: int, chosen: Sequence[bool]) -> list[int]:
        """The items of the chosen spans."""
        grid = self._grid(lanes)
        found = tiles.tiles(spans, starts, grid.rows)
        return tiles.items([tile for own, is_one in zip(found, chosen, strict=True) if is_one for tile in own], grid)
