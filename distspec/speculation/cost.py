"""Expected tokens per second of a policy and its sizes.

Knows latency curves, odds of guesses, and how each policy of `policies` spends its time. Does not know requests,
real trees or messages. Everything is arithmetic on expectations; nothing is random.

A request is a renewal process: rounds of so many tokens that take so long. Two things connect it with the others:
a step has the rows of every request that is there, and a verifier that others keep busy is only free at the end of a
step (`Load`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

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
    """As `rate`, piece by piece, for who cannot be away for long: the policies that branch take a tenth of a second."""
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
