"""Draft messages in, proposals out: the host logic of a draft worker, and of a target worker that drafts too.

Knows the text of each request and how much of it the drafter has. Does not know trees, the target's
engine, sockets or threads; whoever owns it calls it from one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from distspec.drafters.base import Drafter, DraftRow, Proposal
from distspec.errors import IllegalTransition
from distspec.protocol.messages import Draft, Drafted, Drop, Fault, Freed, Refused, SamplingParams


@dataclass(slots=True)
class _Text:
    """told: how many of the tokens the drafter's own sequence shares."""

    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    told: int = 0


class DraftDesk:
    """Answers all Draft messages that wait by one call of the drafter."""

    def __init__(self, drafter: Drafter, clock: Callable[[], float]) -> None:
        self._drafter = drafter
        self._clock = clock
        self._texts: dict[int, _Text] = {}
        self._waiting: dict[int, Draft] = {}

    def receive(self, message: Draft | Drop) -> list[Freed | Refused]:
        """Take a message of a draft worker; what needs no drafting is answered at once.

        A Draft that goes on with a request that is not known here gets no answer: it was given up, which was
        said already.
        """
        if isinstance(message, Drop):
            known = self.forget(message.request)
            return [Freed(request=message.request, epoch=message.epoch)] if known else []
        if message.keep and message.request not in self._texts:
            return []
        try:
            self.take(message)
        except IllegalTransition:
            self.forget(message.request)
            return [Refused(request=message.request, epoch=message.epoch, reason="state", task=message.task)]
        return []

    def take(self, message: Draft) -> None:
        """Change the text as the message says, and queue it for the next step.

        An earlier one of the request that still waits gets no answer any more: whoever sends two has given up
        the first. Raises IllegalTransition, with nothing changed, if the text is not as the message has it.
        """
        text = self._texts.get(message.request)
        if text is None and message.params is not None:
            text = _Text(message.params)
        if text is None or not 0 <= message.keep <= len(text.tokens):
            raise IllegalTransition(f"request {message.request}: no text to keep {message.keep} tokens of")
        self._texts[message.request] = text
        text.params = message.params or text.params
        text.tokens[message.keep :] = message.tokens
        text.told = min(text.told, message.keep)
        self._waiting.pop(message.request, None)
        self._waiting[message.request] = message

    def ready(self) -> bool:
        """A step would draft something."""
        return bool(self._waiting)

    def step(self) -> list[Drafted | Fault]:
        """Propose for everything that waits. A drafter that breaks costs its drafts, not the requests."""
        waiting, self._waiting = list(self._waiting.values()), {}
        if not waiting:
            return []
        began_s = self._clock()
        faults: list[Drafted | Fault] = []
        try:
            proposals = self._drafter.propose([self._row(message) for message in waiting])
        except Exception as error:
            for message in waiting:
                self._drafter.forget(message.request)
                self.distrust(message.request)
            proposals = [Proposal((), ())] * len(waiting)
            faults.append(Fault(reason=f"drafter: {type(error).__name__}: {error}"))
        span = (began_s, self._clock())
        return faults + [
            Drafted(
                request=message.request,
                epoch=message.epoch,
                task=message.task,
                tokens=proposal.tokens,
                parents=proposal.parents,
                span=span,
            )
            for message, proposal in zip(waiting, proposals, strict=True)
        ]

    def distrust(self, request: int) -> None:
        """Somebody else changes the drafter's sequence of this request: what waits is void, and the drafter will
        be told the whole text again."""
        self._waiting.pop(request, None)
        if request in self._texts:
            self._texts[request].told = 0

    def forget(self, request: int) -> bool:
        """Free everything of a request; whether there was anything."""
        self._waiting.pop(request, None)
        self._drafter.forget(request)
        return self._texts.pop(request, None) is not None

    def reset(self) -> None:
        """A new term: forget every request."""
        for request in list(self._texts):
            self.forget(request)

    def check(self) -> None:
        """Prove the books of a drafter that keeps any. Raises AssertionError."""
        self._drafter.check()

    def _row(self, message: Draft) -> DraftRow:
        text = self._texts[message.request]
        keep, text.told = text.told, len(text.tokens)
        return DraftRow(message.request, keep, tuple(text.tokens[keep:]), message.count, text.params)
