"""The host logic of a target worker: messages in, steps of the engine, replies out.

Knows what each request still wants, in which order, and which pages must wait for a transfer. Does not know
the coordinator's reasons, sockets, actors or threads: whoever owns the desk calls it from one thread, and
nothing here waits. Time is the clock it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

from torch import Tensor

from distspec.drafters.base import Drafter, engine_of
from distspec.engine import Engine
from distspec.errors import BadConstraint, IllegalTransition, OutOfSlots
from distspec.muster import Muster
from distspec.protocol.codec import pack_logprobs
from distspec.protocol.messages import (
    Draft,
    Drop,
    Extend,
    Fault,
    Freed,
    Lease,
    Progress,
    Refused,
    Revoke,
    Revoked,
    Verdict,
    Withdraw,
)
from distspec.protocol.values import SamplingParams
from distspec.rounds.admission import Admission
from distspec.rounds.drafting import DraftDesk
from distspec.rounds.features import features
from distspec.rounds.held import Held, Holdings, Reply
from distspec.rounds.lease import begin, draft, end
from distspec.rounds.loop import Loop
from distspec.rounds.tickets import Tickets
from distspec.rounds.work import Work, gives_prompt


class Desk:
    """Serves the requests of one engine. drafter: for leases and Draft messages, None where there are no drafts; the
    engine has the taps that it wants. quick: as in DraftDesk. max_num_batched_tokens bounds the rows of a step.
    overlap, odds: of rounds that roll on the device, see Loop. tickets: of KV and features that come and go.
    """

    def __init__(
        self,
        engine: Engine,
        drafter: Drafter | None,
        *,
        max_num_batched_tokens: int,
        clock: Callable[[], float],
        quick: Drafter | None = None,
        overlap: bool = True,
        odds: tuple[float, ...] = (),
    ) -> None:
        self._engine = engine
        self._drafter = drafter
        self._drafting = DraftDesk(drafter, clock, quick, self._features) if drafter is not None else None
        self._clock = clock
        self._muster = Muster()
        self._outbox: list[Reply] = []
        self._arrivals = count()
        self._loop = Loop(
            engine,
            drafter,
            muster=self._muster,
            clock=clock,
            arrivals=self._arrivals,
            overlap=overlap,
            odds=odds,
        )
        self._held = Holdings(engine, self._drafting, self._muster, self._loop.leave)
        self._admission = Admission(engine, self._held, max_num_batched_tokens)
        self.tickets = Tickets(engine, self._held, clock, self._advance, self._outbox)

    def prepare(self, steps: Iterable[int], only_largest: bool = False) -> None:
        """Capture graphs of steps, and of rounds of so many drafts, before requests arrive; else the first of each kind
        waits for that. only_largest: those that take the most memory, which the others reuse."""
        for engine in (self._engine, engine_of(self._drafter)):
            if engine is not None:
                engine.runner.prepare(only_largest)
        self._loop.prepare(steps, only_largest)

    # -- messages ------------------------------------------------------------------------------

    def receive(self, message: Extend | Lease | Withdraw | Revoke | Drop | Draft) -> list[Reply]:
        """Take a message; what can be answered without computing is answered at once.

        Messages of an epoch that is over for the request are ignored, and so are those that go on with a
        request that is not open here: it was given up, which was said already.
        """
        held = self._held.get(message.request)
        if held is None:
            return self._open(message) if isinstance(message, Extend | Lease) and message.start == 0 else []
        if message.epoch < held.epoch:
            return []
        held.epoch = message.epoch
        if isinstance(message, Drop):
            freed = self._held.release(held)
            return [Freed(request=held.request, epoch=held.epoch)] if freed else []
        if isinstance(message, Draft):
            return self._take_draft(held, message)
        if isinstance(message, Withdraw):
            return self._withdraw(held, message)
        held.inbox.append(message)
        return self._advance(held)

    def ready(self) -> bool:
        """A step would compute or say something."""
        return bool(self._outbox) or self._drafts() or self._loop.ready() or any(held.work for held in self._held)

    def hold_s(self) -> float:
        """Seconds for which it pays to let others come before the next step, if nobody does: 0 to step at once."""
        return 0.0 if self._outbox or self._drafts() or self._loop.ready() else self._wait_s()

    def _drafts(self) -> bool:
        return self._drafting is not None and self._drafting.ready()

    def _wait_s(self) -> float:
        works = [held.work for held in self._held if held.work is not None]
        return self._muster.wait_s(len(works), sum(work.rows for work in works), self._clock())

    def _open(self, message: Extend | Lease) -> list[Reply]:
        task = message.task if isinstance(message, Extend) else None
        reason = "state"
        if message.tokens and message.params is not None:
            try:
                use_cache = not gives_prompt(message, message.params)
                held = self._held.open(message.request, message.epoch, message.tokens, message.params, use_cache)
            except OutOfSlots:
                reason = "slots"
            except BadConstraint:
                reason = "constraint"
            else:
                held.inbox.append(message)
                return self._advance(held)
        return [Refused(request=message.request, epoch=message.epoch, reason=reason, task=task)]

    def compiled(self) -> list[Reply]:
        """Grammars may have become ready, or too slow: the messages that waited for them go on, or end."""
        replies: list[Reply] = []
        for held in self._held.constrained():
            try:
                is_ready = self._engine.is_ready(held.slot)
            except BadConstraint:
                replies.append(self._held.give_up(held, "constraint"))
                continue
            if held.compiling and is_ready:
                held.compiling = False
                replies += self._advance(held)
        return replies

    def _take_draft(self, held: Held, message: Draft) -> list[Reply]:
        """Draft messages say all they need, so they wait for no other message of their request."""
        try:
            if self._drafting is None or held.lease is not None:
                raise IllegalTransition(f"no drafts of request {held.request} here")
            self._drafting.take(message)
        except IllegalTransition:
            return [self._held.give_up(held, "state", message.task)]
        return []

    def _withdraw(self, held: Held, message: Withdraw) -> list[Reply]:
        """Leave out the nodes that are not computed yet, of the work that runs as of those that wait."""
        for waiting in held.inbox:
            if isinstance(waiting, Extend) and waiting.task in message.tasks:
                held.withdrawn.update(node.id for node in waiting.nodes)
        work = held.work
        if work is None or not isinstance(work.message, Extend) or work.message.task not in message.tasks:
            return []
        held.withdrawn.update(node.id for node in work.nodes)
        work.nodes.clear()
        return [] if work.rows else self._finish(held, self._clock())

    def _advance(self, held: Held) -> list[Reply]:
        """Handle the messages of a request up to the one that has to be computed."""
        replies: list[Reply] = []
        while held.inbox and held.idle:
            message = held.inbox.popleft()
            self._loop.leave(held)
            try:
                replies += self._revoke(held, message) if isinstance(message, Revoke) else self._begin(held, message)
            except IllegalTransition:
                task = message.task if isinstance(message, Extend) else None
                replies.append(self._held.give_up(held, "state", task))
        return replies

    def _begin(self, held: Held, message: Extend | Lease) -> list[Reply]:
        """Apply what was decided about nodes and take up the work. Raises IllegalTransition on a disagreement."""
        sequence = self._engine.sequence(held.slot)
        self._muster.returned(held.request, self._clock())
        if held.lease is not None:
            raise IllegalTransition(f"request {held.request} is leased")
        cached = sequence.length if held.fresh else 0  # of the message's own tokens, which start at 0
        held.params = message.params or held.params
        if message.commit or message.drop:
            self._engine.commit(
                held.slot, message.commit, [node for node in message.drop if node not in held.withdrawn]
            )
            held.withdrawn.difference_update(message.drop)
            sequence.trim()
        if message.start != sequence.length - cached:
            raise IllegalTransition(f"request {held.request} has {sequence.length} tokens, not {message.start}")
        if isinstance(message, Lease):
            self._check_lease(message, held.params, len(sequence.nodes))
        held.fresh = False
        tokens, arrival = message.tokens[cached:], next(self._arrivals)
        if isinstance(message, Extend):
            gives = gives_prompt(message, held.params)
            held.work = Work(message, tokens, arrival, cached, held.remaining(message), gives)
        else:
            held.lease, held.emitted, held.told = message, message.emitted, 0
            held.shape, held.most = message.shape, message.nodes
            held.work = begin(held, message, tokens, arrival, cached)
            if self._drafting is not None:
                self._drafting.distrust(held.request)
        return [] if held.work.rows else self._finish(held, self._clock())

    def _check_lease(self, message: Lease, params: SamplingParams, nodes: int) -> None:
        """A lease starts from a root, with no node below it, and must fit to its end."""
        end = message.start + len(message.tokens)
        last = end + params.max_tokens - message.emitted - 1  # the last output token is drawn, never computed
        if not message.tokens or nodes or last > self._engine.max_model_len:
            raise IllegalTransition(f"request {message.request}: no lease from {end} to {last}, {nodes} nodes")

    def _revoke(self, held: Held, message: Revoke) -> list[Reply]:
        """End the lease. A round whose root is judged is ended first, so that no outcome is lost."""
        sequence = self._engine.sequence(held.slot)
        replies: list[Reply] = []
        if held.lease is not None:
            if held.work is not None and held.work.outcomes:
                now_s = self._clock()
                replies.append(end(held, self._engine, next(self._arrivals), (held.work.began_s or now_s, now_s)))
            sequence.trim()
            held.lease = held.work = None
        revoked = Revoked(request=held.request, epoch=message.epoch, length=held.emitted, computed=sequence.length)
        return [*replies, revoked]

    # -- steps ---------------------------------------------------------------------------------

    def step(self) -> list[Reply]:
        """One step of the engine over everything that is ready and fits, and what came of it; and the next round of all
        leases that roll, which is not read before the one after it was launched."""
        replies = list(self._outbox)
        self._outbox.clear()
        if self._is_due():
            # Nothing may be in flight: what a step takes is its own time, and pages may change hands.
            replies += self._landed(self._loop.settle())
            replies += self._step()
        replies += self._landed(self._loop.roll([held for held in self._held if held.drafting]))
        return replies + self.compiled()

    def _is_due(self) -> bool:
        """There is work for an ordinary step. While others roll, it may wait for more that belongs to it."""
        works = any(held.work for held in self._held)
        return self._drafts() or (works and not (self._loop.ready() and self._wait_s()))

    def _landed(self, said: Sequence[Progress | Fault]) -> list[Reply]:
        """Rounds in flight were read: what they said, and what waited for that."""
        replies: list[Reply] = [*said, *self._held.sweep()]
        for held in list(self._held):
            replies += self._advance(held)
        return replies

    def _step(self) -> list[Reply]:
        replies: list[Reply] = []
        if self._drafter is not None and self._drafting is not None:
            replies += self._drafting.step()
            rounds = [held for held in self._held if held.drafting]
            replies += draft(self._drafter, rounds, self._engine, self._clock)
        rows, refused = self._admission.admit()
        replies += refused
        if not rows:
            return replies
        began_s = self._clock()
        outcomes = self._engine.step([segment for _, segment in rows])
        ended_s = self._clock()
        step = (sum(segment.rows for _, segment in rows), ended_s - began_s)
        self._muster.stepped(*step)
        for (held, segment), outcome in zip(rows, outcomes, strict=True):
            assert held.work is not None
            held.work.absorb(segment, outcome, began_s, step)
            if not held.work.rows:
                replies += self._finish(held, ended_s)
        return replies + self.compiled()

    def _finish(self, held: Held, ended_s: float) -> list[Reply]:
        """A work is computed: answer it, and go on with the request."""
        work = held.work
        assert work is not None
        span = (ended_s if work.began_s is None else work.began_s, ended_s)
        if held.lease is not None:
            return [end(held, self._engine, next(self._arrivals), span)]
        held.work = None
        assert isinstance(work.message, Extend)
        verdict = Verdict(
            request=held.request,
            epoch=work.message.epoch,
            task=work.message.task,
            outcomes=tuple(work.outcomes),
            cached=work.cached,
            span=span,
            step=work.step,
            logprobs=tuple(work.logprobs),
            prompt_logprobs=pack_logprobs(work.given),
        )
        self._muster.answered(held.request, len(work.outcomes), ended_s)
        return [verdict, *self._advance(held)]

    def _features(self, request: int, start: int, text: Sequence[int]) -> Tensor:
        """See rounds.features. Of a request that is driven, the newest tokens may still be nodes here; and an Extend
        that came after the draft was asked for may have committed more."""
        held = self._held.get(request)
        assert held is not None  # it is forgotten with its drafts
        below = text[self._engine.sequence(held.slot).length :]
        return features(self._engine, held.slot, range(start, len(text)), below)

    # -- upkeep --------------------------------------------------------------------------------

    def reset(self) -> None:
        """A new term: forget every request. Tickets under way keep their pages until they are ended here, which
        must happen before the new term brings tickets of its own."""
        self._outbox.clear()
        self._loop.reset()
        self._held.reset()

    def check(self) -> None:
        """Prove that every page has exactly its holders. Raises AssertionError."""
        self._engine.check()
        if self._drafting is not None:
            self._drafting.check()
