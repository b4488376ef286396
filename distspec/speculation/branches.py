"""Expected tokens per second of the policies whose drafter branches while a forward is in flight: `ssd`, `bvsp`.

Knows how much of a tree outlives a verdict, and what that saves. What is left of a tree decides how the next round
begins, so rounds are a Markov chain over what is left: expansions of the tree below the new root and, for `bvsp`,
nodes of it that the other verifier judges already. Its stationary average is exact where all depths have the same
odds, up to what is said at each function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

from distspec.speculation.expected import Bush, Odds, Ranking, ranking
from distspec.speculation.load import Load
from distspec.speculation.sizes import Sizes

State = TypeVar("State", bound=Hashable)

SPARE = 4
"""Nodes of the ranking per live node: a tree that was grown in haste also holds unlikely ones."""


class Round(NamedTuple):
    """tokens it commits and seconds it takes, on average. after: (how likely, state), summing to 1."""

    tokens: float
    seconds: float
    after: list[tuple[float, Hashable]]


def branching(load: Load, odds: Odds, sizes: Sizes) -> float:
    """`ssd` (Speculative Speculative Decoding, arXiv 2603.03251): tokens per second of one request.

    A verdict ends somewhere below the judged nodes. What was grown below that end is the next round's draft; levels
    that lack are drafted first. A state is the number of expansions below the end.
    """
    order = _order(odds, sizes)
    verify_s = load.verify_s(sizes.nodes + 1)
    grown = _steps_in(load, sizes, verify_s)

    def play(left: int) -> Round:
        bush = Bush(order, left)
        wait_s = load.late_s(_ripen(load, bush, sizes), verify_s)
        judged = bush.best(sizes.nodes, sizes.topk)
        bush.grow(grown, sizes.width, sizes.live)
        below = order.below(bush.expanded)
        after: list[tuple[float, Hashable]] = [(p, below[end]) for p, end in _ends(order, bush, judged)]
        return Round(_tokens(order, judged), wait_s + verify_s, _filled(after, 0))

    return _average(play, 0)


def branch_verifying(load: Load, odds: Odds, sizes: Sizes) -> float:
    """`bvsp`: tokens per second of one request, with two verifiers that answer in turn.

    As `branching`, but the next likeliest nodes are judged before the verdict is there. If it ends within them, the
    next verdict is on its way already, half a forward ahead on average; else it starts anew. A state is (expansions
    below the end, nodes below the end that are being judged; -1: the end itself is not).
    """
    if load.verifiers == 1:
        return branching(load, odds, sizes)
    order = _order(odds, sizes)
    most = max(sizes.nodes, sizes.early)
    verify_s = load.verify_s(most + 1, futures=2.0)
    grown = max(1, _steps_in(load, sizes, verify_s / 2))

    def play(state: tuple[int, int]) -> Round:
        left, ahead = state
        bush = Bush(order, left)
        if ahead < 0:
            seconds = load.late_s(_ripen(load, bush, sizes), verify_s, 2.0) + verify_s
            judged = bush.best(sizes.nodes, sizes.topk)
        else:
            seconds = verify_s / 2
            judged = bush.best(ahead, len(order.child[0]))
        bush.grow(grown, sizes.width, sizes.live)
        marked = [False] * len(order)
        for node in bush.best(most, len(order.child[0]), frozenset(judged)):
            marked[node] = True
        bush.grow(grown, sizes.width, sizes.live)
        expansions, early = order.below(bush.expanded), order.below(marked)
        after: list[tuple[float, Hashable]] = [
            (p, (expansions[end], early[end] - 1 if marked[end] else -1)) for p, end in _ends(order, bush, judged)
        ]
        return Round(_tokens(order, judged), seconds, _filled(after, (0, -1)))

    return _average(play, (0, -1))


def _order(odds: Odds, sizes: Sizes) -> Ranking:
    return ranking(odds, max(sizes.fan, sizes.topk), 64, SPARE * sizes.live)


def _steps_in(load: Load, sizes: Sizes, seconds: float) -> int:
    """Drafter steps whose result is there in time, asked for `lookahead` at a time."""
    call_s = load.hop_s + sizes.lookahead * load.draft_s(sizes.width)
    return int(seconds / call_s) * sizes.lookahead


def _ripen(load: Load, bush: Bush, sizes: Sizes) -> float:
    """Draft the levels that a round lacks, as `sd` would; seconds that takes."""
    lacking = sizes.steps - bush.height
    if lacking < 1:
        return 0.0
    bush.grow(lacking, sizes.topk, sizes.live)
    return load.hop_s + lacking * load.draft_s(sizes.topk)


def _tokens(order: Ranking, judged: list[int]) -> float:
    return 1.0 + sum(order.value[node] for node in judged)


def _ends(order: Ranking, bush: Bush, judged: list[int]) -> list[tuple[float, int]]:
    """(how likely, node) of the grown nodes in which a walk through the judged ones can end."""
    inside = set(judged)
    return [
        (order.value[child], child)
        for node in (0, *judged)
        if bush.expanded[node]
        for child in order.child[node]
        if child and child not in inside
    ]


def _filled(after: list[tuple[float, Hashable]], miss: Hashable) -> list[tuple[float, Hashable]]:
    """With the outcomes that nobody foresaw."""
    return [*after, (max(0.0, 1.0 - sum(p for p, _ in after)), miss)]


def _average(play: Callable[[State], Round], start: State, rounds: int = 60) -> float:
    """Tokens per second in the long run, of a chain that often comes back to its start."""
    known: dict[Hashable, Round] = {}
    now: dict[Hashable, float] = {start: 1.0}
    tokens = seconds = 0.0
    for i in range(rounds):
        then: dict[Hashable, float] = defaultdict(float)
        for state, share in now.items():
            if state not in known:
                known[state] = play(state)  # type: ignore[arg-type]
            if i >= rounds // 3:
                tokens += share * known[state].tokens
                seconds += share * known[state].seconds
            for p, after in known[state].after:
                then[after] += share * p
        now = then
    return tokens / seconds
