"""Acceptance of trees and the move of what was accepted to the committed end, without the host.

Knows trees as tokens and parents, what the target drew after each node, and locations. Does not know sequences, pages
or requests. A child is accepted if its token is the outcome of its parent (the coupled rule of docs/design.md, section
3), so acceptance is a walk down from the root. Every program walks its slot's tree for itself and moves its share.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from distspec.kernels.launch import early, in_turn


@triton.jit
def _next(token, parent, index, at, outcome, NODES: tl.constexpr):
    """The child of `at` that holds `outcome`; NODES without one. A child comes after its parent, so a walk ends."""
    return tl.min(tl.where((parent == at) & (token == outcome) & (index > at), index, NODES), 0)


@triton.jit(do_not_specialize=["nodes"], do_not_specialize_on_alignment=["last"])
def _kernel(tokens, parents, outcomes, sources, targets, planes, path, counts, last, nodes, places, width,
            NODES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    in_turn(EARLY)
    slot, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    index = tl.arange(0, NODES)
    inside = index < nodes
    token = tl.load(tokens + slot * nodes + index, mask=inside, other=-1)
    parent = tl.load(parents + slot * nodes + index, mask=inside, other=-2)
    depth = 0
    order = tl.full([NODES], -1, tl.int32)  # how deep each accepted node lies
    outcome = tl.load(outcomes + slot * (nodes + 1))
    found = _next(token, parent, index, -1, outcome, NODES)
    while found < NODES:
        order = tl.where(index == found, depth, order)
        depth += 1
        outcome = tl.load(outcomes + slot * (nodes + 1) + 1 + found)
        found = _next(token, parent, index, found, outcome, NODES)

    accepted = order >= 0
    source = tl.load(sources + slot * nodes + index, mask=accepted, other=0)
    target = tl.load(targets + slot * nodes + order, mask=accepted, other=0)
    moving = (accepted & (source != target))[:, None]
    content = planes + plane * places * width
    for start in range(0, width, BLOCK):
        lane = start + tl.arange(0, BLOCK)
        mask = moving & (lane < width)[None, :]
        kept = tl.load(content + source[:, None] * width + lane[None, :], mask=mask, other=0.0)
        # A target may be the source of another node: all are read before one is written.
        tl.debug_barrier()
        tl.store(content + target[:, None] * width + lane[None, :], kept, mask=mask)
    if plane == 0:
        tl.store(path + slot * nodes + index, tl.full([NODES], -1, tl.int64), mask=inside)
        tl.debug_barrier()
        tl.store(path + slot * nodes + order, index.to(tl.int64), mask=accepted)
        tl.store(counts + slot, depth.to(tl.int64))
        tl.store(last + slot, outcome)


def accept_and_move(
    tokens: Tensor, parents: Tensor, outcomes: Tensor, sources: Tensor, targets: Tensor, planes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk down each slot's tree and bring the KV of accepted nodes to the committed end.

    All int64. tokens, parents: [slots, nodes], at least one node; a parent is an index before the node's own, -1 the
    root, -2 no node at all. outcomes: [slots, nodes + 1], what the target drew after the root and after each node.
    sources: [slots, nodes], location of each node. targets: [slots, nodes], location of each further committed
    position; slots share no location. planes: [planes, locations, width], contiguous, written to.
    Returns path int64 [slots, nodes], accepted nodes from the root down, then -1; counts int64 [slots], of these;
    last int64 [slots], the outcome after the last of them.
    """
    slots, nodes = tokens.shape
    count, places, width = planes.shape
    path = torch.empty_like(tokens)
    counts, last = torch.empty(2, slots, dtype=torch.int64, device=tokens.device)
    padded = max(2, triton.next_power_of_2(nodes))
    block = min(triton.next_power_of_2(width), max(32, 4096 // padded))
    _kernel[(slots, count)](
        tokens,
        parents,
        outcomes,
        sources,
        targets,
        planes,
        path,
        counts,
        last,
        nodes,
        places,
        width,
        NODES=padded,
        BLOCK=block,
        **early(),
        num_warps=4,
    )
    return path, counts, last


def accept_and_move_reference(
    tokens: Tensor, parents: Tensor, outcomes: Tensor, sources: Tensor, targets: Tensor, planes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    slots, nodes = tokens.shape
    path = torch.full_like(tokens, -1)
    counts, last = torch.zeros(2, slots, dtype=torch.int64, device=tokens.device)
    for slot in range(slots):
        walk: list[int] = []
        at, outcome = -1, int(outcomes[slot, 0])
        while at is not None:
            children = [i for i in range(at + 1, nodes) if (parents[slot, i], tokens[slot, i]) == (at, outcome)]
            at = children[0] if children else None
            if at is not None:
                walk.append(at)
                outcome = int(outcomes[slot, at + 1])
        path[slot, : len(walk)] = torch.tensor(walk, dtype=torch.int64)
        counts[slot], last[slot] = len(walk), outcome
        planes[:, targets[slot, : len(walk)]] = planes[:, sources[slot, walk]]
    return path, counts, last
