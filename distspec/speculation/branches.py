"""Expected tokens per second of the policies whose drafter branches while a forward is in flight: `ssd`, `bvsp`.

Knows what a drafter and several verifiers do meanwhile, on average. What is left of a tree, and who is busy with what,
decides how the next round goes, so there is no formula over rounds. Instead the policy is played, on a text that has
every guess right just as often as the odds say, so that luck chooses no sizes; with trees of which only costs are known
(`canopy`), it takes a tenth of a second. One request is played; of others it meets their rows, the drafter's steps that
they share, and the steps of verifiers that begin without it.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass

from distspec.speculation.canopy import TOKENS, Canopy
from distspec.speculation.expected import Odds, odds_at
from distspec.speculation.load import Load
from distspec.speculation.sizes import Sizes

Valuing = Generator[None, None, float]
"""Arithmetic that takes a while, a millisecond or so at a time; it returns tokens per second of one request."""

EVENTS = 16
"""Of a play at a time."""

HOLD = 0.02
"""How long a step waits for those who come at once, of its own time. From the timed simulator."""

GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, without their whole part, are spread evenly however many there are."""


def branching(load: Load, odds: Odds, sizes: Sizes) -> Valuing:
    """`ssd` (Speculative Speculative Decoding, arXiv 2603.03251): tokens per second of one request.

    A verdict ends somewhere below the judged nodes. What was grown below that end is the next round's draft; levels
    that lack are drafted first.
    """
    return _Play(load, odds, sizes, 1).run()


def branch_verifying(load: Load, odds: Odds, sizes: Sizes) -> Valuing:
    """`bvsp`: tokens per second of one request, with all verifiers.

    As `branching`, but once `branch_nodes` further nodes wait, a further verifier judges them and all above them,
    before the verdict is there. If it ends within them, the next verdict is on its way already; else it starts anew,
    while further verifiers are still busy with what is dead.
    """
    return _Play(load, odds, sizes, load.verifiers).run()


@dataclass(slots=True)
class _Call:
    """Of the drafter: growths of (steps, width) that its answer brings, for the root it was asked about. It began, or
    will, at `begin_s` and takes `step_s` for each step."""

    run: int
    growths: list[tuple[int, int]]
    begin_s: float
    step_s: float
    answer_s: float

    def done(self, now_s: float) -> int:
        """Steps that it has begun by then, or more."""
        return max(0, math.ceil((now_s - self.begin_s) / self.step_s - 1e-9))


class _Drafter:
    """A new call takes the place of the one before, between two steps. What that has grown stays; it is answered only
    if it was in its last step."""

    def __init__(self, load: Load, sizes: Sizes) -> None:
        self._load, self._sizes = load, sizes
        self._is_shared = load.batch > load.drafters
        self._rows, self._steps = float(sizes.branch_width), 1
        self._last: _Call | None = None
        self.calls: list[_Call] = []
        self.is_asked = False

    @property
    def is_awaited(self) -> bool:
        """The last call was not answered."""
        return any(call is self._last for call in self.calls)

    def ask(self, now_s: float, canopy: Canopy, steps: int, width: int) -> None:
        widths = list(canopy.widths(steps, width))
        self._rows += sum(widths)
        self._steps += steps
        step_s, come_s = self._step_s(widths), now_s + self._load.hop_s / 2
        begin_s, before = come_s, list[tuple[int, int]]()
        old = self._last
        if old is not None and self.is_awaited:
            done, total = old.done(come_s), sum(n for n, _ in old.growths)
            begin_s = max(begin_s, old.begin_s + done * old.step_s)
            if done < total:
                self.calls.remove(old)
                before = _first(old.growths, done) if old.run == canopy.run else []
        if self._is_shared:  # others keep it busy
            begin_s = max(begin_s, math.ceil(come_s / step_s - 1e-9) * step_s)
        answer_s = begin_s + steps * step_s + self._load.hop_s / 2
        begin_s -= sum(n for n, _ in before) * step_s
        self._last = _Call(canopy.run, [*before, (steps, width)], begin_s, step_s, answer_s)
        self.calls.append(self._last)
        self.is_asked = True

    def _step_s(self, widths: list[int]) -> float:
        """On average. Where others draft as well, each misses a step between two calls."""
        if not self._is_shared:
            return sum(self._load.draft_s(max(1, rows)) for rows in widths) / len(widths)
        ahead = self._sizes.lookahead
        return self._load.draft_s(max(1.0, self._rows / self._steps * ahead / (1 + ahead)))


@dataclass(slots=True)
class _Future:
    """verifier: its number. run: of the root it was sent for; known: as of Canopy."""

    verifier: int
    run: int
    known: int
    answer_s: float


class _Verifiers:
    """What one request has in flight, on verifiers that others share.

    A verifier whose step ends begins the next with who is back at once. Whoever comes later finds it begun, unless
    nobody else was there: of `n` that share it, 1 - 1/n times.
    """

    def __init__(self, load: Load, count: int) -> None:
        self._load = load
        self.futures: list[_Future] = []
        self._last_s, self._known = [-math.inf] * count, [0] * count
        self._used_s, self._since_s = 8 * count * load.target(1), -10 * load.target(1)
        self._rows = self._squares = self._sent = 0

    def free(self) -> list[int]:
        busy = {future.verifier for future in self.futures}
        return [i for i in range(len(self._last_s)) if i not in busy]

    def send(self, now_s: float, canopy: Canopy, verifier: int, sent: tuple[int, int]) -> None:
        """sent: nodes and known position, as of Canopy."""
        nodes, known = sent
        rows = nodes + max(0, canopy.root - self._known[verifier])
        self._known[verifier] = known
        self._rows, self._squares, self._sent = self._rows + rows, self._squares + rows * rows, self._sent + 1
        in_flight = self._used_s / (now_s - self._since_s) / (1 - HOLD)  # of the time in which there are steps
        sharing = self._load.sharing(in_flight)
        step_s = self._step_s(rows, sharing)
        self._used_s += step_s
        wait_s = self._wait_s(now_s, self._last_s[verifier], step_s, sharing) if sharing > 1 else 0.0
        self.futures.append(_Future(verifier, canopy.run, known, now_s + wait_s + step_s + self._load.hop_s))

    def answered(self, future: _Future) -> None:
        self.futures.remove(future)
        self._last_s[future.verifier] = future.answer_s

    def _step_s(self, rows: int, sharing: float) -> float:
        """Of a step with these rows and those of others, which are in it or not and have more rows or fewer: half of
        them a deviation more than on average, half as much less, since rows beyond some number are dearer."""
        mean, square = self._rows / self._sent, self._squares / self._sent
        requests = max(sharing, self._load.batch * len(self._last_s) / self._load.verifiers)
        share, others = sharing / requests, (sharing - 1) * mean
        deviation = math.sqrt(max(0.0, requests - 1) * (share * square - (share * mean) ** 2))
        spread = min(deviation, others)
        return sum(self._load.target(rows + others + by) for by in (-spread, spread)) / 2

    def _wait_s(self, now_s: float, last_s: float, step_s: float, sharing: float) -> float:
        """Until the next step begins."""
        if now_s == last_s:
            return HOLD * step_s
        if last_s == -math.inf or self._sent * GOLDEN % 1 >= 1 - 1 / sharing:
            return 0.0
        late_s = now_s - last_s + self._load.hop_s
        return max(0.0, math.ceil(late_s / step_s - 1e-9) * step_s - late_s)


class _Play:
    """As `policies.Branching` and `BranchVerifying`, line by line."""

    def __init__(self, load: Load, odds: Odds, sizes: Sizes, verifiers: int) -> None:
        topk = max(sizes.branch_topk, sizes.topk)
        self._sizes, self._now_s = sizes, 0.0
        self._canopy = Canopy(odds_at(odds, 0), topk, sizes.topk, sizes.max_live_nodes)
        self._drafter, self._verifiers = _Drafter(load, sizes), _Verifiers(load, verifiers)

    def run(self) -> Valuing:
        events = 0
        while self._canopy.root < TOKENS:
            self._grow()
            self._submit()
            self._grow()
            self._next()
            events += 1
            if events % EVENTS == 0:
                yield
        return self._canopy.root / self._now_s

    def _next(self) -> None:
        """Whatever is answered first."""
        calls, futures, canopy = self._drafter.calls, self._verifiers.futures, self._canopy
        self._now_s = min([*(call.answer_s for call in calls), *(future.answer_s for future in futures)])
        call = next((call for call in calls if call.answer_s == self._now_s), None)
        if call is not None:
            calls.remove(call)
            if call.run == canopy.run:
                for steps, width in call.growths:
                    canopy.grow(steps, width)
            return
        future = next(future for future in futures if future.answer_s == self._now_s)
        self._verifiers.answered(future)
        if future.run == canopy.run and future.known >= canopy.root:
            canopy.move(future.known + 1)
            self._drafter.is_asked = False

    def _grow(self) -> None:
        canopy, drafter, sizes = self._canopy, self._drafter, self._sizes
        if (drafter.is_awaited and drafter.is_asked) or canopy.is_full:
            return
        if canopy.is_judged:
            drafter.ask(self._now_s, canopy, sizes.lookahead, sizes.branch_width)
        elif not self._is_ripe():
            drafter.ask(self._now_s, canopy, sizes.steps - canopy.height, sizes.topk)

    def _submit(self) -> None:
        canopy, free, sizes = self._canopy, self._verifiers.free(), self._sizes
        if not canopy.is_judged:
            if not free or not self._is_ripe():
                return
            self._verifiers.send(self._now_s, canopy, free.pop(0), canopy.judge_best(sizes.nodes))
        is_stuck = canopy.is_full and not self._drafter.is_awaited
        for verifier in free:
            sent = canopy.judge_next(max(sizes.nodes, sizes.branch_nodes), 1 if is_stuck else sizes.branch_nodes)
            if sent is None:
                break
            self._verifiers.send(self._now_s, canopy, verifier, sent)

    def _is_ripe(self) -> bool:
        if self._canopy.height >= self._sizes.steps:
            return True
        return self._drafter.is_asked and self._canopy.nodes > 0 and not self._drafter.is_awaited


def _first(growths: list[tuple[int, int]], steps: int) -> list[tuple[int, int]]:
    """The first so many steps of them."""
    out = []
    for count, width in growths:
        taken = min(count, steps)
        steps -= taken
        if taken:
            out.append((taken, width))
    return out
