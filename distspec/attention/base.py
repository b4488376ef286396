"""What the engine and an attention backend ask of each other.

Knows rows, pages and which positions a row may see. Does not know requests, tokens or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from distspec.kv.pool import KVPool


@dataclass(frozen=True)
class Span:
    """The rows of one sequence in a step: its last `suffix` committed tokens, then scratch nodes.

    pages: of the sequence; its logical index i lies at pages[i // page_size] * page_size + i % page_size.
    length: committed positions, those of this step included. A committed row sees the positions up to its own;
    a node row sees all `length` of them and the logical indices in its entry of `nodes` (its scratch ancestors
    and itself). write: location of each row's own key and value.
    """

    pages: Sequence[int]
    length: int
    suffix: int
    nodes: tuple[Sequence[int], ...]
    write: Sequence[int]

    @property
    def rows(self) -> int:
        return self.suffix + len(self.nodes)

    @cached_property
    def extent(self) -> int:
        """Logical indices that hold everything these rows see."""
        return max(map(max, self.nodes)) + 1 if self.nodes else self.length


class AttentionBackend(Protocol):
    """Attention over paged KV. Made once per engine; `plan` once per step, `read` once per layer."""

    def __init__(self, pool: KVPool, page_size: int, num_heads: int) -> None: ...

    def plan(self, spans: Sequence[Span]) -> Any:
        """What all layers of a step share: indices and masks, on the device. Rows stand in the order of spans.

        Its `write` is int64 [rows]: the location of each row's own key and value."""
        ...

    def read(self, plan: Any, layer: int, q: Tensor) -> Tensor:
        """Attend to pages that hold the step's own keys and values by now; scores are scaled by head_dim ** -0.5.

        q: [rows, heads, head_dim]. Returns [rows, heads * head_dim], or of a pool of latents [rows, heads * latent].
        """
        ...


@dataclass(frozen=True, slots=True)
class Places:
    """Chains of rows at positions that only the device knows. tables: int64 [texts + 1, pages], page numbers; lengths:
    int64 [texts + 1]; the last of both is nobody's. rows: int64 [n], of these, one for each chain, which begins at the
    text's length + offset. Chains of the last one, and positions below 0, only pad: they write to the pool's spare
    location, and what they read is of no use."""

    tables: Tensor
    lengths: Tensor
    rows: Tensor
    offset: int


@runtime_checkable
class DevicePlans(Protocol):
    """What a backend offers beside if it can plan without the host knowing any length: in rounds that follow each other
    before their results are read. Chains are committed rows: each sees the positions up to its own.
    """

    def chains(self, places: Places, count: int) -> Any:
        """A plan of `count` rows at consecutive positions for each place, chain after chain."""
        ...

    def steps(self, places: Places, count: int) -> Sequence[Any]:
        """Plans of `count` steps of one row for each place, each one position further than the step before."""
        ...


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sizes of steps that share a captured forward. rows: of the step, padded; words: of the mask of a row; kind: what
    else the backend tells calls apart by."""

    rows: int
    words: int
    kind: int


@runtime_checkable
class StaticPlans(Protocol):
    """What a backend offers beside if its plans are integers at places that only a bucket's sizes decide: a captured
    forward then reads the plan of the next step from the buffer of the last."""

    def buckets(self, rows: int, scratch: int) -> Sequence[Bucket]:
        """All that steps of up to so many rows may need, whose nodes lie up to so many indices above the length."""
        ...

    def bucket(self, spans: Sequence[Span], rows: int, scratch: int) -> Bucket | None:
        """The one of `buckets` that fits spans of up to so many rows in all; None if nodes lie higher."""
        ...

    def lay_out(self, spans: Sequence[Span], bucket: Bucket) -> list[int]:
        """The plan as integers, of any number: the page tables, which vary, are last."""
        ...

    def bind(self, integers: Tensor, bucket: Bucket) -> Any:
        """The plan that reads what `lay_out` returned from int64 [n] on the device, n being at least as long."""
        ...
