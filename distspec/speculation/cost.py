"""Expected tokens per second of a policy and its sizes, and the best of them.

Knows latency curves, odds of guesses, and how each policy of `policies` spends its time. Does not know requests,
real trees or messages. Everything is arithmetic on expectations; nothing is random.

A request is a renewal process: rounds of so many tokens that take so long. Two things connect it with the others:
a step has the rows of every request that is there, and a verifier that others keep busy is only free at the end of a
step (`Load`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from distspec.speculation.branches import Valuing, branch_verifying, branching
from distspec.speculation.expected import Bush, Odds, survival, tau
from distspec.speculation.load import Load
from distspec.speculation.sizes import Sizes


def rate(policy: str, sizes: Sizes, load: Load, odds: Odds) -> float:
    """Expected tokens per second of all requests together, under one of POLICIES."""
    valuing = value(policy, sizes, load, odds)
    while True:
        try:
            next(valuing)
        except StopIteration as done:
            found: float = done.value
            return found


def value(policy: str, sizes: Sizes, load: Load, odds: Odds) -> Valuing:
    """As `rate`, piece by piece, for who cannot be away for long: the policies that branch take up to a second."""
    one = (yield from PIECEWISE[policy](load, odds, sizes)) if policy in PIECEWISE else RATES[policy](load, odds, sizes)
    return load.batch * one


def plain(load: Load, odds: Odds, sizes: Sizes) -> float:
    """`ar`, at home and without messages: 1 / t_v."""
    return 1.0 / load.target(load.sharing())


def sequential(load: Load, odds: Odds, sizes: Sizes) -> float:
    """`sd` (arXiv 2211.17192): tau / (k t_d + t_v), and the hops of both.

    With topk > 1, tau is of the likeliest `nodes` of the tree that so many drafter steps grow.
    """
    draft_s = load.draft_s(1) + (sizes.steps - 1) * load.draft_s(sizes.topk) + load.hop_s
    if sizes.topk == 1:
        judged = min(sizes.nodes, sizes.steps)
        return tau(odds, judged) / (draft_s + load.verify_s(judged + 1))
    bush = Bush(odds, sizes.topk)
    bush.grow(sizes.steps, sizes.topk, max(sizes.max_live_nodes, sizes.nodes))
    nodes = bush.best(sizes.nodes, sizes.topk)
    tokens = 1.0 + sum(bush.value[node] for node in nodes)
    return tokens / (draft_s + load.verify_s(len(nodes) + 1))


def distributed(load: Load, odds: Odds, sizes: Sizes) -> float:
    """`dsi` (arXiv 2405.14105): 1/(1-a) / (t_v + L t_d a/(1-a^L)) with verifiers enough, L >= t_v / (N t_d).

    The c-th chunk of L guesses is drafted after c L t_d and judged at once; a run of guesses that ends within it costs
    its start and one forward; the root is chunk 0, judged alone. With fewer verifiers a chunk starts when one is free,
    each t_v / N, and a single one also judges the root that the chunk before left open. A verifier lacks what others
    judged in between, as far as it was right. Requests that share verifiers keep in step (see `muster`).
    """
    chunk, verifiers = sizes.lookahead, load.verifiers
    every_s = chunk * load.draft_s(1) + load.hop_s
    if every_s > 0.9 * load.verify_s(1):
        return 0.9 * plain(load, odds, sizes)  # a root's verdict comes before its chunk, which begins anew each time
    futures = min(verifiers, math.ceil(load.verify_s(chunk + 1) / every_s))
    right = survival(odds)
    lacks = chunk * (futures - 1) * right[min(chunk, len(right) - 1)] if verifiers > 1 else 1
    verify_s = load.verify_s(chunk + lacks, futures)
    stride = chunk + (verifiers == 1 and verify_s >= 2 * every_s)
    spacing_s = max(every_s, verify_s / verifiers)
    seconds = verify_s + right[1] * load.draft_s(1) / 2
    seconds += sum(right[i] for i in range(1, len(right), stride)) * spacing_s
    return sum(right) / seconds


def early_verifying(load: Load, odds: Odds, sizes: Sizes) -> float:
    """`pearl` (arXiv 2408.11850): from a fresh root, `lookahead` guesses are judged early; then each forward judges
    what was drafted during the one before, at most `steps` below the root.

    A run of r guesses takes the first forward, and one more for each s + 1 guesses beyond. Among others, the next step
    has begun before what a verdict allows is there.
    """
    first = min(sizes.lookahead, sizes.steps)
    call_s = first * load.draft_s(1) + load.hop_s
    verify_s = load.verify_s(sizes.steps + 1)
    drafted = int(verify_s / call_s) * first
    more = max(1, min(sizes.steps + 1, drafted))
    right = survival(odds)
    forwards = 1.0 + sum(right[i] for i in range(first + 1, len(right), more))
    seconds = load.late_s(load.draft_s(1) / 2 + call_s, verify_s) + verify_s
    seconds += (forwards - 1) * (max(verify_s, call_s) + load.late_s(load.hop_s, verify_s) - load.hop_s)
    return sum(right) / seconds


RATES: dict[str, Callable[[Load, Odds, Sizes], float]] = {
    "ar": plain,
    "sd": sequential,
    "pearl": early_verifying,
    "dsi": distributed,
}
"""Tokens per second of one request."""

PIECEWISE: dict[str, Callable[[Load, Odds, Sizes], Valuing]] = {"ssd": branching, "bvsp": branch_verifying}
"""The same of policies for which it takes long."""


def best(policies: Iterable[str], most: Sizes, load: Load, odds: Odds) -> tuple[str, Sizes, float]:
    """The policy and sizes with the most expected tokens per second, and how many.

    most: no size goes beyond; its branch_topk, branch_width and max_live_nodes are taken as they are. Plain decoding is
    always among the choices, and wins ties.
    """
    choice, sizes, top = "ar", most, rate("ar", most, load, odds)
    for policy, some in candidates(policies, most):
        value = rate(policy, some, load, odds)
        if value > top * (1 + 1e-9):
            choice, sizes, top = policy, some, value
    return choice, sizes, top


def candidates(policies: Iterable[str], most: Sizes) -> Iterator[tuple[str, Sizes]]:
    """Policies and sizes worth comparing; plain decoding aside."""
    return ((policy, sizes) for policy in policies for sizes in choices(policy, most))


def choices(policy: str, most: Sizes) -> Iterator[Sizes]:
    """Sizes worth comparing: a grid that is fine where little things matter.

    Policies that branch judge deeper than they draft on a miss, since what was foreseen is drafted already.
    """
    steps = [k for k in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16) if k <= most.steps]
    if policy == "pearl":
        for k in (k for k in steps if k <= most.nodes):
            yield from (replace(most, steps=k, topk=1, nodes=k, lookahead=n) for n in (1, 2) if n <= most.lookahead)
    elif policy == "dsi":
        for chunk in (k for k in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16) if k <= min(most.lookahead, most.nodes)):
            yield replace(most, steps=chunk, topk=1, nodes=chunk, lookahead=chunk)
    elif policy == "sd":
        for k in steps:
            for topk in range(1, most.topk + 1):
                for nodes in _nodes(k, topk, most.nodes):
                    yield replace(most, steps=k, topk=topk, nodes=nodes, lookahead=min(2, most.lookahead))
    elif policy in ("ssd", "bvsp"):
        yield from dict.fromkeys(_branched(SSD if policy == "ssd" else BVSP, most))


SSD = tuple((k, n * k, 2, 16) for k in (2, 4, 6) for n in (2, 4))
"""Steps, nodes, lookahead and branch_nodes that `ssd` is compared with."""

BVSP = (
    *((k, nodes, 2, branch) for k, nodes in ((1, 8), (2, 8), (1, 16), (2, 16), (4, 16)) for branch in (4, nodes)),
    *((1, 4, 2, branch) for branch in (8, 16)),
    *((k, 64, ahead, 16) for k in (2, 4) for ahead in (2, 4, 6)),
)
"""The same of `bvsp`: where rows are dear, few nodes in each of many futures; else a whole bush, and a second verifier
that begins halfway through the forward of the first, 2 to 6 drafter steps later."""


def _branched(grid: Iterable[tuple[int, int, int, int]], most: Sizes) -> Iterator[Sizes]:
    for steps, nodes, ahead, branch in grid:
        sizes = replace(most, steps=min(steps, most.steps), nodes=min(nodes, most.nodes))
        yield replace(sizes, topk=1, lookahead=min(ahead, most.lookahead), branch_nodes=min(branch, most.branch_nodes))
    if most.topk > 1:
        for steps in (2, 4):
            sizes = replace(most, steps=min(steps, most.steps), nodes=min(64, most.nodes))
            yield replace(sizes, lookahead=min(2, most.lookahead))


def _nodes(steps: int, topk: int, most: int) -> list[int]:
    """How many of what so many steps draft to judge: a chain whole, of a tree about a power of two."""
    if topk == 1:
        return [steps] if steps <= most else []
    drafted = topk + (steps - 1) * topk * topk
    return sorted({min(n, drafted, most) for n in (4, 8, 16, 32, 64) if n >= steps})
