"""Draft messages in, proposals out: the host logic of a draft worker, and of a target worker that drafts too.

Knows the text of each request, how much of it the drafter has, and how far each draft has come. Does not know how
proposals are judged, the target's engine, sockets or threads; whoever owns it calls it from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import structs
from torch import Tensor

from distspec.drafters.base import Drafter, DraftRow, Proposal, taps_of
from distspec.errors import IllegalTransition
from distspec.protocol.messages import Draft, Drafted, Drop, Fault, Freed, Refused
from distspec.protocol.values import SamplingParams
from distspec.rounds.arrivals import Arrivals


@dataclass(slots=True)
class _Text:
    """told: how many of its tokens each drafter has, the quick one last."""

    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=lambda: [0, 0])


@dataclass(slots=True)
class _Turn:
    """A draft under way: `left` steps of its shape are still to be grown. began_s: when it was taken up."""

    message: Draft
    left: int
    began_s: float | None = None


Reader = Callable[[int, int, Sequence[int]], Tensor]
"""(request, start, text) -> features of the position before each token of the text from `start` on: [tokens, F]."""


class DraftDesk:
    """Answers Draft messages. quick: the fallback drafter, which answers those that ask for it, at once. For a drafter
    that wants features: `read`s them where the target is, or waits for `arrivals`.

    The drafter goes on in slices, as long as the draft that wants least, so that what arrives meanwhile joins in; or
    shorter, where it hears that something has come.
    """

    def __init__(
        self,
        drafter: Drafter,
        clock: Callable[[], float],
        quick: Drafter | None = None,
        read: Reader | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._drafters = (drafter, quick) if quick is not None else (drafter,)
        self._clock = clock
        self._arrivals = arrivals if taps_of(drafter) else None
        self._read = (arrivals.take if arrivals is not None else read) if taps_of(drafter) else None
        self._texts: dict[int, _Text] = {}
        self._turns: dict[int, _Turn] = {}

    def receive(self, message: Draft | Drop) -> list[Freed | Refused]:
        """Take a message of a draft worker; what needs no drafting is answered at once.

        A Draft that goes on with a request that is not known here gets no answer: it was given up, which was
        said already.
        """
        if isinstance(message, Drop):
            known = self.forget(message.request)
            return [Freed(request=message.request, epoch=message.epoch)] if known else []
        if message.keep and message.request not in self._texts:
            self._decline(message)
            return []
        try:
            self.take(message)
        except IllegalTransition:
            self._decline(message)
            return [self._refuse(message, "state")]
        return []

    def take(self, message: Draft) -> None:
        """Change the text as the message says, and queue it for the next step.

        An earlier one of the request that is not answered gets no answer any more: whoever sends two has given up
        the first. Raises IllegalTransition, with nothing changed, if the text is not as the message has it.
        """
        text = self._texts.get(message.request)
        if text is None and message.params is not None:
            text = _Text(message.params)
        if text is None or not 0 <= message.keep <= len(text.tokens):
            raise IllegalTransition(f"request {message.request}: no text to keep {message.keep} tokens of")
        if self._arrivals is not None:
            self._arrivals.expect(message, message.keep + len(message.tokens) - 1, is_needed=not self._asks(message))
        self._texts[message.request] = text
        text.params = message.params or text.params
        text.tokens[message.keep :] = message.tokens
        text.told = [min(told, message.keep) for told in text.told]
        self._turns.pop(message.request, None)
        self._turns[message.request] = _Turn(message, message.shape.steps)

    def ready(self) -> bool:
        """A step would draft something."""
        return any(map(self._can_grow, self._turns.values()))

    def step(self) -> list[Drafted | Fault | Refused]:
        """Grow a slice of every draft under way whose features are here; answer those that are done."""
        said: list[Drafted | Fault | Refused] = []
        able = [turn for turn in self._turns.values() if self._can_grow(turn)]
        for which in reversed(range(len(self._drafters))):
            turns = [turn for turn in able if self._asks(turn.message) == which]
            said += self._grow(turns, which) if turns else []
        return said

    def _asks(self, message: Draft) -> int:
        """The index of the drafter that is to answer."""
        return min(message.shape.quick, len(self._drafters) - 1)

    def _can_grow(self, turn: _Turn) -> bool:
        request = turn.message.request
        if self._arrivals is None or self._asks(turn.message):
            return True
        return self._arrivals.covers(request, len(self._texts[request].tokens) - 1)

    def _grow(self, turns: list[_Turn], which: int) -> list[Drafted | Fault | Refused]:
        """A drafter that breaks costs its drafts, not the requests."""
        began_s = self._clock()
        steps = min(turn.left for turn in turns)
        rows = [self._row(turn, steps, which) for turn in turns]
        faults: list[Drafted | Fault | Refused] = []
        try:
            proposals = self._drafters[which].propose(rows)
        except Exception as error:
            faults.append(Fault(reason=f"drafter: {type(error).__name__}: {error}"))
            if self._arrivals is not None and not which:
                return faults + [self._refuse(turn.message, "drafter") for turn in turns]
            for turn in turns:
                self._drafters[which].forget(turn.message.request)
                self._texts[turn.message.request].told[which] = turn.left = 0
            proposals = [Proposal((), ())] * len(turns)
        ended_s = self._clock()
        slice_ = (len(turns), (ended_s - began_s) / max(1, steps))
        done: list[Drafted | Fault | Refused] = []
        for turn, proposal in zip(turns, proposals, strict=True):
            turn.began_s = began_s if turn.began_s is None else turn.began_s
            turn.left = max(0, turn.left - steps) + proposal.left
            if not turn.left:
                del self._turns[turn.message.request]
                done.append(self._drafted(turn.message, proposal, (turn.began_s, ended_s), slice_))
        return faults + done

    def _refuse(self, message: Draft, reason: str) -> Refused:
        """Give a request up: what the drafter knew of its features is lost, or never came."""
        self.forget(message.request)
        return Refused(request=message.request, epoch=message.epoch, reason=reason, task=message.task)

    def _decline(self, message: Draft) -> None:
        if self._arrivals is not None and message.features is not None:
            self._arrivals.decline(message.features)

    def _drafted(
        self, message: Draft, proposal: Proposal, span: tuple[float, float], step: tuple[int, float]
    ) -> Drafted:
        return Drafted(
            request=message.request,
            epoch=message.epoch,
            task=message.task,
            base=len(self._texts[message.request].tokens),
            tokens=proposal.tokens,
            parents=proposal.parents,
            scores=proposal.scores,
            span=span,
            step=step,
        )

    def distrust(self, request: int) -> None:
        """Somebody else changes the drafter's text of this request: what waits is void, and the drafter will be told
        the whole text again."""
        self._turns.pop(request, None)
        if request in self._texts:
            self._texts[request].told[0] = 0

    def forget(self, request: int) -> bool:
        """Free everything of a request; whether there was anything."""
        self._turns.pop(request, None)
        for drafter in self._drafters:
            drafter.forget(request)
        if self._arrivals is not None:
            self._arrivals.forget(request)
        return self._texts.pop(request, None) is not None

    def reset(self) -> None:
        """A new term: forget every request."""
        for request in list(self._texts):
            self.forget(request)

    def check(self) -> None:
        """Prove the books of drafters that keep any. Raises AssertionError."""
        for drafter in self._drafters:
            drafter.check()
        if self._arrivals is not None:
            self._arrivals.check(self._texts)

    def _row(self, turn: _Turn, steps: int, which: int) -> DraftRow:
        message, text = turn.message, self._texts[turn.message.request]
        keep, text.told[which] = text.told[which], len(text.tokens)
        shape = structs.replace(message.shape, steps=steps)
        features = self._read(message.request, keep, text.tokens) if self._read is not None and not which else None
        return DraftRow(message.request, keep, tuple(text.tokens[keep:]), shape, text.params, features)
