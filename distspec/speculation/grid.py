"""Sizes of each policy that are worth comparing: a grid that is fine where little things matter.

Knows bounds. Does not know what sizes are worth: `cost` says that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from distspec.speculation.sizes import Sizes

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
"""Of a chain."""

SSD = tuple((k, n * k, 2, 16) for k in (2, 4, 6) for n in (2, 4))
"""Steps, nodes, lookahead and branch_nodes that `ssd` is compared with: policies that branch judge deeper than they
draft on a miss, since what was foreseen is drafted already."""

BVSP = (
    *((k, nodes, 2, branch) for k, nodes in ((1, 8), (2, 8), (1, 16), (2, 16), (4, 16)) for branch in (4, nodes)),
    *((1, 4, 2, branch) for branch in (8, 16)),
    *((k, 64, ahead, 16) for k in (2, 4) for ahead in (2, 4, 6)),
)
"""The same of `bvsp`: where rows are dear, few nodes in each of many futures; else a whole bush, and a second verifier
that begins halfway through the forward of the first, 2 to 6 drafter steps later."""


def candidates(policies: Iterable[str], most: Sizes) -> Iterator[tuple[str, Sizes]]:
    """Policies and sizes worth comparing, within `most`; plain decoding aside, whose sizes do not matter."""
    return ((policy, sizes) for policy in policies if policy in GRIDS for sizes in GRIDS[policy](most))


def _sequential(most: Sizes) -> Iterator[Sizes]:
    for k in _up_to(most.steps):
        for topk in range(1, most.topk + 1):
            for nodes in _nodes(k, topk, most.nodes):
                yield replace(most, steps=k, topk=topk, nodes=nodes, lookahead=min(2, most.lookahead))


def _early_verifying(most: Sizes) -> Iterator[Sizes]:
    for k in _up_to(min(most.steps, most.nodes)):
        for first in (1, 2):
            if first <= most.lookahead:
                yield replace(most, steps=k, topk=1, nodes=k, lookahead=first)


def _distributed(most: Sizes) -> Iterator[Sizes]:
    for chunk in _up_to(min(most.lookahead, most.nodes)):
        yield replace(most, steps=chunk, topk=1, nodes=chunk, lookahead=chunk)


def _branched(grid: Iterable[tuple[int, int, int, int]], most: Sizes) -> Iterable[Sizes]:
    """Each once: bounds may make several the same."""

    def all_of_them() -> Iterator[Sizes]:
        for steps, nodes, ahead, branch in grid:
            some = replace(most, steps=min(steps, most.steps), nodes=min(nodes, most.nodes), topk=1)
            yield replace(some, lookahead=min(ahead, most.lookahead), branch_nodes=min(branch, most.branch_nodes))
        for steps in (2, 4) if most.topk > 1 else ():
            some = replace(most, steps=min(steps, most.steps), nodes=min(64, most.nodes))
            yield replace(some, lookahead=min(2, most.lookahead))

    return dict.fromkeys(all_of_them())


GRIDS: dict[str, Callable[[Sizes], Iterable[Sizes]]] = {
    "sd": _sequential,
    "pearl": _early_verifying,
    "dsi": _distributed,
    "ssd": partial(_branched, SSD),
    "bvsp": partial(_branched, BVSP),
}


def _up_to(most: int) -> list[int]:
    return [k for k in LENGTHS if k <= most]


def _nodes(steps: int, topk: int, most: int) -> list[int]:
    """How many of what so many steps draft to judge: a chain whole, of a tree about a power of two."""
    if topk == 1:
        return [steps] if steps <= most else []
    drafted = topk + (steps - 1) * topk * topk
    return sorted({min(n, drafted, most) for n in (4, 8, 16, 32, 64) if n >= steps})
