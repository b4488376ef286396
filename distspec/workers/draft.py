"""A draft worker's work: all drafts that are waiting go into one call of the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distspec.drafters.base import Drafter, DraftRow, Proposal
from distspec.errors import IllegalTransition
from distspec.protocol.messages import Draft, Drafted, Drop, Fault, Freed, Message, Refused, SamplingParams


class DraftWork:
    """clock: wall time in seconds, for spans."""

    def __init__(self, drafter: Drafter, clock: Callable[[], float]) -> None:
        self._drafter, self._clock = drafter, clock
        self._params: dict[int, SamplingParams] = {}
        self._waiting: list[Draft] = []

    def receive(self, message: Message) -> Sequence[Message]:
        if isinstance(message, Draft):
            if message.params is not None:
                self._params[message.request] = message.params
            if message.request not in self._params:
                return [_refused(message)]
            self._waiting.append(message)
            return []
        if isinstance(message, Drop):
            self._forget(message.request)
            return [Freed(request=message.request, epoch=message.epoch)]
        return [Fault(reason=f"{type(message).__name__} is nothing for a draft worker")]

    def ready(self) -> bool:
        return bool(self._waiting)

    def step(self) -> Sequence[Message]:
        """One proposal per request that waits; a second draft of a request builds on the first, so it waits."""
        batch = {draft.request: draft for draft in reversed(self._waiting)}
        drafts = list(reversed(batch.values()))
        self._waiting = [draft for draft in self._waiting if batch[draft.request] is not draft]
        began_s = self._clock()
        proposals = self._propose(drafts)
        span = (began_s, self._clock())
        return [self._reply(*pair, span) for pair in zip(drafts, proposals, strict=True)]

    def reset(self, incarnation: int) -> None:
        self._waiting.clear()
        for request in list(self._params):
            self._forget(request)

    def check(self) -> None:
        """A drafter keeps no books that could leak: what it holds of requests, it may forget at any time."""

    def _propose(self, drafts: list[Draft]) -> list[Proposal | None]:
        """None for a draft that does not fit what is known of its sequence: it must not cost the others theirs."""
        rows = [DraftRow(d.request, d.keep, d.tokens, d.count, self._params[d.request]) for d in drafts]
        try:
            return list(self._drafter.propose(rows))
        except IllegalTransition:
            return [self._alone(row) for row in rows]

    def _alone(self, row: DraftRow) -> Proposal | None:
        try:
            return self._drafter.propose([row])[0]
        except IllegalTransition:
            return None

    def _reply(self, draft: Draft, proposal: Proposal | None, span: tuple[float, float]) -> Message:
        if proposal is None:
            self._forget(draft.request)
            return _refused(draft)
        return Drafted(
            request=draft.request,
            epoch=draft.epoch,
            task=draft.task,
            tokens=proposal.tokens,
            parents=proposal.parents,
            span=span,
        )

    def _forget(self, request: int) -> None:
        self._params.pop(request, None)
        self._waiting = [draft for draft in self._waiting if draft.request != request]
        self._drafter.forget(request)


def _refused(draft: Draft) -> Refused:
    return Refused(request=draft.request, epoch=draft.epoch, reason="state", task=draft.task)
