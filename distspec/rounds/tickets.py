"""What transfers may read and write of requests here, and when: tickets of KV and features.

Knows holdings and positions. Does not know how anything is sent, what requests compute, or why a ticket was asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from distspec.engine import Engine
from distspec.errors import BadConstraint, OutOfPages, OutOfSlots, TransferFailed
from distspec.protocol.messages import Received, ReceiveKV, Refused, SendFeatures, SendKV, TransferLost
from distspec.rounds.features import reader
from distspec.rounds.held import Held, Holdings, Reply


class Tickets:
    """advance: handles the messages of a request that waited for a ticket. outbox: takes what is to be said with the
    next step."""

    def __init__(
        self,
        engine: Engine,
        held: Holdings,
        clock: Callable[[], float],
        advance: Callable[[Held], list[Reply]],
        outbox: list[Reply],
    ) -> None:
        self._engine, self._held, self._clock = engine, held, clock
        self._advance, self._outbox = advance, outbox

    def source(self, message: SendKV, cut: Callable[[], None]) -> int:
        """Slot whose positions [start, start+length) the ticket may read, as far as they are `computed`, until `sent`.

        Once all are, even if a Drop comes. If the request is let go before, `cut` is called, and the ticket is to read
        no more when that returns. Raises TransferFailed if they are not held here, nor about to be.
        """
        held = self._source(message)
        length = held.promised(self._engine.sequence(held.slot).length)
        if length < message.start + message.length:
            raise TransferFailed(f"request {message.request} has KV of {length} tokens (ticket {message.ticket})")
        held.growing[message.ticket] = cut
        self.computed(message)
        return held.slot

    def computed(self, message: SendKV) -> int:
        """Up to where the positions of a ticket are computed, or about to be by what was launched."""
        held = self._held.get(message.request)
        if held is None or message.ticket not in held.growing:
            return message.start + message.length
        stop = min(self._engine.sequence(held.slot).length, message.start + message.length)
        if stop == message.start + message.length:
            del held.growing[message.ticket]
            held.tickets[message.ticket] = self._clock()
        return stop

    def features_of(self, message: SendFeatures) -> Callable[[range], Tensor]:
        """See rounds.features.reader. It may read until `sent`, even if a Drop comes."""
        held = self._source(message)
        read = reader(self._engine, held.slot, message)
        held.tickets[message.ticket] = self._clock()
        return read

    def _source(self, message: SendKV | SendFeatures) -> Held:
        held = self._held.get(message.request)
        if held is None or message.epoch < held.epoch or held.receiving is not None:
            raise TransferFailed(f"request {message.request} is not held here (ticket {message.ticket})")
        return held

    def sent(self, request: int, ticket: int) -> None:
        """The ticket reads no more, whether it succeeded or not."""
        held = self._held.of_ticket(request, ticket)
        if held is not None:
            self._outbox += self._held.end_ticket(held, ticket)
        elif (known := self._held.get(request)) is not None:
            known.growing.pop(ticket, None)

    def reserve(self, message: ReceiveKV) -> int | Refused | TransferLost:
        """Slot whose positions [start, start+length) the ticket may write until `received` or `lost`.

        The request is new here and start is 0, or its committed length is start. Refused: nothing is held.
        """
        held = self._held.get(message.request)
        if held is None and message.start == 0:
            try:
                held = self._held.open(message.request, message.epoch, message.tokens, message.params, use_cache=False)
            except (OutOfSlots, BadConstraint) as error:
                reason = "slots" if isinstance(error, OutOfSlots) else "constraint"
                return Refused(request=message.request, epoch=message.epoch, reason=reason)
        if held is None or message.epoch < held.epoch:
            return _lost(message, "state")
        if held.work or held.lease or not held.settled or message.start != self._engine.sequence(held.slot).length:
            return _lost(message, "state", freed=self._held.release(held))
        held.epoch, held.params, held.fresh = message.epoch, message.params, False
        try:
            self._engine.reserve(held.slot, message.length)
        except OutOfPages:
            return self._held.give_up(held, "pages")
        held.receiving = message.ticket
        held.tickets[message.ticket] = self._clock()
        return held.slot

    def received(self, message: ReceiveKV) -> Received:
        """All KV of the ticket is written: its tokens are committed, and messages that waited go on."""
        held = self._held.of_ticket(message.request, message.ticket)
        now_s = began_s = self._clock()
        if held is not None:
            began_s = held.tickets[message.ticket]
            self._engine.sequence(held.slot).append(message.tokens[message.start : message.start + message.length])
            self._outbox += self._held.end_ticket(held, message.ticket)
            self._outbox += self._advance(held)
        return Received(request=message.request, epoch=message.epoch, ticket=message.ticket, span=(began_s, now_s))

    def lost(self, message: ReceiveKV, reason: str) -> TransferLost:
        """The ticket failed and writes no more: everything of the request is freed.

        Where another ticket or a Drop is still to be answered, a Freed says so instead of this reply.
        """
        held = self._held.of_ticket(message.request, message.ticket)
        freed = False
        if held is not None:
            self._outbox += self._held.end_ticket(held, message.ticket)
            freed = self._held.get(held.request) is held and self._held.release(held)
        return _lost(message, reason, freed)


def _lost(message: ReceiveKV, reason: str, freed: bool = False) -> TransferLost:
    return TransferLost(request=message.request, epoch=message.epoch, ticket=message.ticket, reason=reason, freed=freed)
