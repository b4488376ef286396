"""Expected tokens per second of the policies whose drafter branches while a forward is in flight: `ssd`, `bvsp`.

Knows how much of a tree outlives a verdict, and what that saves. What is left of a tree decides how the next round
begins, so rounds are a Markov chain over what is left: expansions and levels of the tree below the new root and, for
`bvsp`, nodes of it that the other verifier judges already. Its average is near the truth, not exact: the shape of what
is left is not remembered, nor when within a forward the other verifier answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Hashable
from typing import NamedTuple, TypeVar

from distspec.speculation.expected import Bush, Odds
from distspec.speculation.load import Load
from distspec.speculation.sizes import Sizes

State = TypeVar("State", bound=Hashable)


QUARTERS = 4
"""States tell apart so many parts of a forward."""

RARE = 1e-3
"""A state of less weight is taken to be the first: it is not worth the time to look at."""


Valuing = Generator[None, None, float]
"""Arithmetic that takes a while, a millisecond or so at a time; it returns tokens per second of one request."""


class Round(NamedTuple):
    """tokens it commits and seconds it takes, on average. after: (how likely, state), summing to 1."""

    tokens: float
    seconds: float
    after: list[tuple[float, Hashable]]


def branching(load: Load, odds: Odds, sizes: Sizes) -> Valuing:
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
        after: list[tuple[float, Hashable]] = [(p, (_about(left[end]), levels[end])) for p, end in bush.ends(judged)]
        return Round(_tokens(bush, judged), wait_s + verify_s, _filled(after, (0, 0)))

    return _average(play, (0, 0))


def branch_verifying(load: Load, odds: Odds, sizes: Sizes) -> Valuing:
    """`bvsp`: tokens per second of one request, with two verifiers.

    As `branching`, but once `early` further nodes wait, the other verifier judges them, before the verdict is there.
    If it ends within them, the next verdict is on its way already; else it starts anew, while the other verifier is
    still busy with what is dead. A state is (expansions, levels, nodes that are being judged, quarters of a forward
    until the other verifier answers) below the end; -1 nodes where the end itself is not being judged.
    """
    if load.verifiers == 1:
        return branching(load, odds, sizes)
    fan, most = max(sizes.fan, sizes.topk), max(sizes.nodes, sizes.early)
    verify_s = load.verify_s(most + 1, futures=2.0)
    crowd_s = load.crowd(2.0) * verify_s  # among others, the next step has begun before an answer is back

    def play(state: tuple[int, int, int, int]) -> Round:
        left, levels, ahead, quarters = state
        bush, busy_s = Bush(odds, fan, left, levels), quarters * verify_s / QUARTERS
        if ahead < 0:
            wait_s = load.late_s(_ripen(load, bush, sizes), verify_s, 2.0) or crowd_s
            judged, seconds = bush.best(sizes.nodes, sizes.topk), wait_s + verify_s
            ready_s = max(busy_s, wait_s + _gather(load, bush, sizes, len(judged)))
            _grow_for(load, bush, sizes, ready_s - wait_s)
        else:
            judged, seconds = bush.best(ahead, fan), busy_s
            ready_s = _gather(load, bush, sizes, ahead)
        further = bush.best(most, fan, frozenset(judged)) if ready_s < seconds else []
        _grow_for(load, bush, sizes, seconds - ready_s)
        later = (
            round(min(1.0, (max(0.0, ready_s + crowd_s / 2 + verify_s - seconds)) / verify_s) * QUARTERS)
            if further
            else 0
        )
        early, known = bush.counts(further), set(further)
        remains, heights = bush.below()
        after: list[tuple[float, Hashable]] = [
            (p, (_about(remains[end]), heights[end], _about(early[end] - 1) if end in known else -1, later))
            for p, end in bush.ends(judged)
        ]
        return Round(_tokens(bush, judged), seconds, _filled(after, (0, 0, -1, later)))

    return _average(play, (0, 0, -1, 0))


def _gather(load: Load, bush: Bush, sizes: Sizes, judged: int) -> float:
    """Grow until `early` nodes wait besides the judged ones, or there is no room; seconds that takes."""
    calls = 0
    while len(bush) - judged < sizes.early and len(bush) < sizes.live:
        bush.grow(sizes.lookahead, sizes.width, sizes.live)
        calls += 1
    return calls * _call_s(load, sizes)


def _grow_for(load: Load, bush: Bush, sizes: Sizes, seconds: float) -> None:
    bush.grow(_steps_in(load, sizes, max(0.0, seconds)), sizes.width, sizes.live)


def _call_s(load: Load, sizes: Sizes) -> float:
    """Of a drafter that grows `lookahead` steps, from asking to its answer."""
    return load.hop_s + sizes.lookahead * load.draft_s(sizes.width)


def _steps_in(load: Load, sizes: Sizes, seconds: float) -> int:
    """Drafter steps whose result is there in time, asked for `lookahead` at a time."""
    return int(seconds / _call_s(load, sizes)) * sizes.lookahead


def _ripen(load: Load, bush: Bush, sizes: Sizes) -> float:
    """Draft the levels that a round lacks, as `sd` would, in one growth; seconds that takes."""
    lacking = sizes.steps - bush.height
    if lacking <= 0 or len(bush) >= sizes.live:
        return 0.0
    bush.grow(lacking, sizes.topk, sizes.live)
    return load.hop_s + lacking * load.draft_s(sizes.topk)


def _tokens(bush: Bush, judged: list[int]) -> float:
    return 1.0 + sum(bush.value[node] for node in judged)


def _about(count: int) -> int:
    """To the nearest of two binary digits, so that states are few."""
    if count < 4:
        return count
    shift = count.bit_length() - 2
    return (count + (1 << shift) // 2) >> shift << shift


def _filled(after: list[tuple[float, Hashable]], miss: Hashable) -> list[tuple[float, Hashable]]:
    """With the outcomes that nobody foresaw."""
    return [*after, (max(0.0, 1.0 - sum(p for p, _ in after)), miss)]


def _average(play: Callable[[State], Round], start: State, rounds: int = 60) -> Valuing:
    """Tokens per second in the long run, of a chain that often comes back to its start."""
    known: dict[Hashable, Round] = {}
    now: dict[Hashable, float] = {start: 1.0}
    tokens = seconds = 0.0
    for i in range(rounds):
        then: dict[Hashable, float] = defaultdict(float)
        for state, share in now.items():
            if share < RARE:
                then[start] += share
                continue
            if state not in known:
                known[state] = play(state)  # type: ignore[arg-type]
                yield
            if i >= rounds // 3:
                tokens += share * known[state].tokens
                seconds += share * known[state].seconds
            for p, after in known[state].after:
                then[after] += share * p
        now = then
    return tokens / seconds
