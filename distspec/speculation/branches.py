"""Expected tokens per second of the policies whose drafter branches while a forward is in flight: `ssd`, `bvsp`.

Knows how much of a tree outlives a verdict, and what that saves. What is left of a tree decides how the next round
begins, so rounds are a Markov chain over what is left: expansions and levels of the tree below the new root and, for
`bvsp`, nodes of it that the other verifier judges already. Its average is near the truth, not exact: the shape of what
is left is not remembered, nor when within a forward the other verifier answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

from distspec.speculation.expected import Bush, Odds
from distspec.speculation.load import Load
from distspec.speculation.sizes import Sizes

State = TypeVar("State", bound=Hashable)


class Round(NamedTuple):
    """tokens it commits and seconds it takes, on average. after: (how likely, state), summing to 1."""

    tokens: float
    seconds: float
    after: list[tuple[float, Hashable]]


def branching(load: Load, odds: Odds, sizes: Sizes) -> float:
    """`ssd` (Speculative Speculative Decoding, arXiv 2603.03251): tokens per second of one request.

    A verdict ends somewhere below the judged nodes. What was grown below that end is the next round's draft; levels
    that lack are drafted first. A state is (expansions, levels) below the end.
    """
    fan = max(sizes.fan, sizes.topk)
    verify_s = load.verify_s(sizes.nodes + 1)
    grown = _steps_in(load, sizes, verify_s)

    def play(state: tuple[int, int]) -> Round:
        bush = Bush(odds, fan, *state)
        wait_s = load.late_s(_ripen(load, bush, sizes), verify_s)
        judged = bush.best(sizes.nodes, sizes.topk)
        bush.grow(grown, sizes.width, sizes.live)
        left, levels = bush.below()
        after: list[tuple[float, Hashable]] = [(p, (left[end], levels[end])) for p, end in bush.ends(judged)]
        return Round(_tokens(bush, judged), wait_s + verify_s, _filled(after, (0, 0)))

    return _average(play, (0, 0))


def branch_verifying(load: Load, odds: Odds, sizes: Sizes) -> float:
    """`bvsp`: tokens per second of one request, with two verifiers that answer in turn.

    As `branching`, but the next likeliest nodes are judged before the verdict is there. If it ends within them, the
    next verdict is on its way already, half a forward ahead on average; else it starts anew. A state is (expansions,
    levels, nodes that are being judged) below the end; -1 nodes where the end itself is not.
    """
    if load.verifiers == 1:
        return branching(load, odds, sizes)
    fan, most = max(sizes.fan, sizes.topk), max(sizes.nodes, sizes.early)
    verify_s = load.verify_s(most + 1, futures=2.0)
    grown = max(1, _steps_in(load, sizes, verify_s / 2))

    def play(state: tuple[int, int, int]) -> Round:
        *kept, ahead = state
        bush = Bush(odds, fan, *kept)
        if ahead < 0:
            seconds = load.late_s(_ripen(load, bush, sizes), verify_s, 2.0) + verify_s
            judged = bush.best(sizes.nodes, sizes.topk)
        else:
            seconds = verify_s / 2
            judged = bush.best(ahead, fan)
        bush.grow(grown, sizes.width, sizes.live)
        further = bush.best(most, fan, frozenset(judged))
        bush.grow(grown, sizes.width, sizes.live)
        (left, levels), early, known = bush.below(), bush.counts(further), set(further)
        after: list[tuple[float, Hashable]] = [
            (p, (left[end], levels[end], early[end] - 1 if end in known else -1)) for p, end in bush.ends(judged)
        ]
        return Round(_tokens(bush, judged), seconds, _filled(after, (0, 0, -1)))

    return _average(play, (0, 0, -1))


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


def _tokens(bush: Bush, judged: list[int]) -> float:
    return 1.0 + sum(bush.value[node] for node in judged)


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
