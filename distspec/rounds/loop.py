"""Leased rounds that follow each other on the device: round N+1 is launched before round N is read.

Knows which leases roll, what of their rounds is in flight, and what each round that was read adds to the books. Does
not know messages, other work of the worker, or what a round computes (engine.rolling).

A lease rolls while it has one token left to compute, and a chain of drafts or none. Its books hold what was read; pages
are held up to where what is in flight may write. A row whose stream has ended may have one round more in flight, whose
result nobody wants. Until that is read its slot stays open, see Held.flying, so nobody else gets pages that may still
be written.

Where the host has a part in each token of some row of a launch, round N+1 is begun, N read, and then N+1 finished: what
the host does for such rows, and the books of all, hide behind the forward. Others in the same launch lose nothing but
that their round is launched in parts; a second forward for them would cost more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from distspec.drafters.base import Drafter, DraftRow, Loan, lender_of
from distspec.engine import Begun, Engine, Flight, Rolling
from distspec.errors import OutOfPages
from distspec.muster import Muster
from distspec.protocol.messages import Fault, Lease, Progress
from distspec.protocol.values import SamplingParams, Shape, TokenLogprobs, finish_reason
from distspec.rounds.held import Held
from distspec.rounds.lease import begin
from distspec.sampling import edited


@dataclass(slots=True, eq=False)
class _Row:
    """A lease that rolls. root: the last token of its text, as far as that was read. steps: drafts of each round.
    loan: of the drafter, None for plain decoding. needy: see needs_host."""

    held: Held
    lease: Lease
    root: int
    steps: int
    loan: Loan | None
    needy: bool

    @property
    def is_over(self) -> bool:
        """The lease has ended; what its rounds in flight bring is of no use."""
        return self.held.lease is not self.lease


@dataclass(frozen=True, slots=True)
class _Round:
    flight: Flight
    rows: Sequence[_Row]
    launched_s: float


class Loop:
    """overlap False: each round is read before the next is launched. arrivals: numbers the works that go back to
    ordinary steps. odds: see Rolling."""

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        *,
        muster: Muster,
        clock: Callable[[], float],
        arrivals: Iterator[int],
        overlap: bool,
        odds: tuple[float, ...] = (),
    ) -> None:
        self._engine = engine
        self._drafter = drafter
        self._lender = lender_of(drafter)
        self._rolling = Rolling(engine, self._lender.engine if self._lender is not None else None, odds=odds)
        self._muster = muster
        self._clock = clock
        self._arrivals = arrivals
        self._overlap = overlap
        self._rows: dict[int, _Row] = {}  # by slot
        self._rounds: deque[_Round] = deque()
        self._read_s = 0.0

    def prepare(self, steps: Iterable[int], only_largest: bool = False) -> None:
        """Capture the graphs of rounds of so many drafts, see Rolling.prepare; the most first, which take most."""
        for drafts in sorted(steps, reverse=True):
            if self._rolling.can(drafts):
                self._rolling.prepare(drafts, only_largest)

    def ready(self) -> bool:
        """There is something to launch or to read."""
        return bool(self._rows)

    def roll(self, beginning: Sequence[Held]) -> list[Progress | Fault]:
        """Take in what can roll of leases whose rounds begin; launch the next round of each row, one launch for all
        that draft alike; then read what was launched before, or all if rounds may not overlap."""
        before, said = len(self._rounds), list[Progress | Fault](self._enter(beginning))
        begun = self._launch()
        said += self._read(before)
        for one in begun:
            self._finish(*one)
        if not self._overlap:
            said += self._read(len(self._rounds))
        return said

    def settle(self) -> list[Progress]:
        """Read all that is in flight."""
        return self._read(len(self._rounds))

    def leave(self, held: Held) -> None:
        """Hand a lease back to ordinary steps, or let go of it if it has ended; but not while a round of it is in
        flight: then it goes when that was read, if it has ended or messages wait for it."""
        row = self._rows.get(held.slot)
        if row is not None and row.held is held and not held.flying:
            self._leave(row)

    def reset(self) -> None:
        """Wait for what is in flight, and do without it."""
        rounds, self._rounds = self._rounds, deque()
        for row in self._rows.values():
            row.held.flying = 0
        for one in rounds:
            one.flight.read()
        for row in [row for row in self._rows.values() if row.is_over]:
            self._leave(row)

    # -- rows ----------------------------------------------------------------------------------

    def _enter(self, beginning: Sequence[Held]) -> list[Fault]:
        able = [(held, steps) for held in beginning if (steps := self._steps(held)) is not None]
        loans, faults = self._lend([held for held, steps in able if steps])
        for held, steps in able:
            loan = loans.get(held.slot)
            if not steps or loan is not None:
                self._rows[held.slot] = self._row(held, steps, loan)
        return faults

    def _lend(self, drafted: Sequence[Held]) -> tuple[dict[int, Loan | None], list[Fault]]:
        """Loans by slot. A drafter that breaks costs its drafts, not the requests."""
        if not drafted:
            return {}, []
        assert self._drafter is not None
        assert self._lender is not None
        try:
            loans = self._lender.lend([self._text(held) for held in drafted])
        except Exception as error:
            for held in drafted:
                self._drafter.forget(held.request)
                held.told, held.shape = 0, None
            return {}, [Fault(reason=f"drafter: {type(error).__name__}: {error}")]
        for held in drafted:
            held.told = 0  # whoever wraps the lender does not hear how the text goes on
        return {held.slot: loan for held, loan in zip(drafted, loans, strict=True)}, []

    def _row(self, held: Held, steps: int, loan: Loan | None) -> _Row:
        assert held.lease is not None
        assert held.work is not None
        [root] = held.work.tokens
        held.work = None
        self._rolling.enter(held.slot, root, loan.slot if loan is not None else None)
        return _Row(held, held.lease, root, steps, loan, needs_host(held.params))

    def _steps(self, held: Held) -> int | None:
        """Drafts of each of its rounds, None if it cannot roll, or has no room for a round."""
        sequence = self._engine.sequence(held.slot)
        # A root that is the prompt's last token is none of the output, which edits are about.
        if held.inbox or (needs_host(held.params) and sequence.length < held.params.prompt_tokens):
            return None
        steps = chain_steps(held.shape, held.most) if self._drafter is not None else 0
        lends = self._lender is not None and self._engine.is_coupled
        if steps is None or (steps and not lends) or not self._rolling.can(steps):
            return None
        return steps if self._hold(held, sequence.length + 1 + steps) else None

    def _text(self, held: Held) -> DraftRow:
        assert held.work is not None
        assert held.shape is not None
        tokens = (*self._engine.sequence(held.slot).tokens[held.told :], *held.work.tokens)
        return DraftRow(held.request, held.told, tokens, held.shape, held.params)

    def _hold(self, held: Held, end: int) -> bool:
        """Have pages for the positions before `end`; False if there are none, or the model takes no text so long."""
        if end > self._engine.max_model_len:
            return False
        try:
            self._engine.reserve(held.slot, end - self._engine.sequence(held.slot).length)
        except OutOfPages:
            return False
        return True

    def _leave(self, row: _Row) -> None:
        held = row.held
        del self._rows[held.slot]
        self._rolling.leave(held.slot)
        if row.loan is not None:
            row.loan.close()
        if row.is_over:
            self._engine.sequence(held.slot).trim()
        else:
            held.work = begin(held, row.lease, (row.root,), next(self._arrivals))

    # -- rounds --------------------------------------------------------------------------------

    def _launch(self) -> list[tuple[Begun, list[_Row], float]]:
        """The next round of all rows that go on; rounds that are only begun, with their rows and when that was."""
        begun: list[tuple[Begun, list[_Row], float]] = []
        going: dict[int, list[_Row]] = {}
        for row in list(self._rows.values()):
            if self._goes_on(row):
                going.setdefault(row.steps, []).append(row)
            else:
                self.leave(row.held)
        for steps, rows in going.items():
            launched_s, slots = self._clock(), [row.held.slot for row in rows]
            if any(row.needy for row in rows):
                begun.append((self._rolling.begin(slots, steps), rows, launched_s))
            else:
                self._rounds.append(_Round(self._rolling.launch(slots, steps), rows, launched_s))
            for row in rows:
                row.held.flying += 1
        return begun

    def _finish(self, begun: Begun, rows: Sequence[_Row], launched_s: float) -> None:
        """All rounds before it were read."""
        flight = self._rolling.finish(begun, {row.held.slot for row in rows if not row.is_over})
        self._rounds.append(_Round(flight, rows, launched_s))

    def _goes_on(self, row: _Row) -> bool:
        """Whether the next round of a row may be launched: its stream cannot have ended for sure by what is in flight,
        no message waits for that, and there is room."""
        held = row.held
        if row.is_over or held.inbox or held.emitted + held.flying >= held.params.max_tokens:
            return False
        end = self._rolling.reach(held.slot, row.steps)
        return self._hold(held, end) and (row.loan is None or row.loan.hold(end))

    def _read(self, count: int) -> list[Progress]:
        said: list[Progress] = []
        for _ in range(count):
            one = self._rounds.popleft()
            found = one.flight.read()
            # Rounds run one after the other: until the one before was read, this one may have waited.
            began_s, self._read_s = max(one.launched_s, self._read_s), self._clock()
            span = (began_s, self._read_s)
            step = self._step(one, self._read_s - began_s)
            for row, tokens, told in zip(one.rows, found, one.flight.logprobs, strict=True):
                row.held.flying -= 1
                if not row.is_over:
                    said.append(self._progress(row, tokens, told, span, step))
                if row.is_over:
                    self.leave(row.held)
        return said

    def _step(self, one: _Round, seconds: float) -> tuple[int, float]:
        """Rows and seconds of the target's step; 0 seconds where drafts were made meanwhile, see Progress."""
        rows = len(one.rows) * (one.flight.steps + 1)
        if one.flight.steps:
            return (rows, 0.0)
        self._muster.stepped(rows, seconds)
        return (rows, seconds)

    def _progress(
        self,
        row: _Row,
        tokens: tuple[int, ...],
        told: tuple[TokenLogprobs, ...],
        span: tuple[float, float],
        step: tuple[int, float],
    ) -> Progress:
        """Book what a round committed. Drafts past the last token that may be emitted count for nothing. told: logprobs
        of the tokens, where they are asked for."""
        held, start = row.held, row.held.emitted
        drafted = min(row.steps, held.params.max_tokens - start - 1)
        judged = tokens[: drafted + 1]
        emitted, reason = _until_end(judged, held.params, start)
        accepted = min(len(emitted), len(judged) - 1)
        sequence = self._engine.sequence(held.slot)
        sequence.append((row.root, *emitted[:accepted]))
        held.emitted += len(emitted)
        row.root = emitted[-1]
        if reason is not None:
            held.lease = None
        end = self._rolling.reach(held.slot, row.steps)
        sequence.trim(max(0, end - sequence.length))
        if row.loan is not None:
            row.loan.follow(emitted, end)
        return Progress(
            request=held.request,
            epoch=row.lease.epoch,
            start=start,
            tokens=emitted,
            drafted=(drafted,),
            accepted=(accepted,),
            ended=reason,
            span=span,
            step=step,
            logprobs=told[: len(emitted)],
        )


def needs_host(params: SamplingParams) -> bool:
    """Whether the host has a part in each token: in what the text so far allows, or logprobs."""
    return edited(params) or params.logprobs is not None


def chain_steps(shape: Shape | None, judged: int) -> int | None:
    """Drafts of a round if they are a chain, of which so many are judged; None if they are a tree."""
    if shape is None:
        return 0
    return min(shape.steps, shape.depth, shape.nodes, judged) if shape.topk == 1 else None


def _until_end(tokens: tuple[int, ...], params: SamplingParams, emitted: int) -> tuple[tuple[int, ...], str | None]:
    """The tokens up to the one that ends the stream, and why it does. emitted: output tokens before these."""
    for count, token in enumerate(tokens, 1):
        reason = finish_reason(params, emitted + count, token)
        if reason is not None:
            return tokens[:count], reason
    return tokens, None
