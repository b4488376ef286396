"""Features that targets send to a draft worker: which of each text are here, and which are on their way.

Knows tickets, positions, and the transport that brings them. Does not know drafters, what a draft is made of, or who
decided which target sends what.

They land in memory of their own, which belongs to nobody else before or after, so a ticket can be given up at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from distspec.errors import IllegalTransition
from distspec.protocol.messages import Draft, TransferLost
from distspec.protocol.values import FeatureTicket
from distspec.transfer.aside import Aside
from distspec.transfer.base import End, Incoming, Transport, pieces

Later = Callable[[Callable[[], Sequence[TransferLost]]], None]
"""Runs an action on the thread that everything here belongs to, from any thread; what it returns is sent."""


@dataclass(slots=True, eq=False)
class _Part:
    """Features of the positions from `start` on. found: [positions, F], all of them written once `is_here`."""

    ticket: int
    start: int
    found: Tensor
    is_here: bool = False

    @property
    def stop(self) -> int:
        return self.start + len(self.found)


@dataclass(slots=True)
class _Stock:
    """Of one text. taken: those of the first so many positions were handed on. parts: what is there, or under way,
    behind them, in order and without a gap. lossy: one was lost, which whoever sent the drafts may not know yet.
    """

    taken: int = 0
    parts: list[_Part] = field(default_factory=list)
    lossy: bool = False


class Arrivals:
    """width: values of a position's features; dtype, device: of the tensors. The drafter wants them there."""

    def __init__(
        self, transport: Transport, later: Later, *, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._transport, self._later = transport, later
        self._width, self._dtype, self._device = width, dtype, device
        self._aside = Aside(device)
        self._stocks: dict[int, _Stock] = {}

    def expect(self, message: Draft, stop: int, is_needed: bool) -> None:
        """A draft came, below a text of stop+1 tokens: receive what it names, in place of all that was to come from
        that position on. is_needed: it is to be drafted from features of the positions before `stop`.

        Raises IllegalTransition, with nothing changed, if some of these are neither here nor promised. Where a ticket
        was lost they may be: whoever sent the draft will hear of that, and send another.
        """
        stock, source = self._stocks.get(message.request) or _Stock(), message.features
        taken, start = min(stock.taken, max(0, message.keep - 1)), stop if source is None else source.start
        kept = [part for part in stock.parts if part.start < start and part.stop <= message.keep]
        promised = kept[-1].stop if kept else taken
        fits = start < stop and (start == promised or (not kept and start < taken))
        if is_needed and (stop if fits else promised) < stop and not stock.lossy:
            raise IllegalTransition(f"request {message.request}: features of {promised} positions, {stop} are needed")
        self._give_up(part for part in stock.parts if part not in kept)
        stock.taken, stock.parts = taken, kept
        self._stocks[message.request] = stock
        if source is not None:
            if fits:
                stock.lossy = False
                stock.parts.append(self._receive(message, source, stop))
            else:
                self.decline(source)

    def decline(self, source: FeatureTicket) -> None:
        """Features that are of no use: their source is told, and does not wait."""
        self._transport.refuse(source.ticket, End(source.peer, source.peer_incarnation))

    def covers(self, request: int, stop: int) -> bool:
        """Whether the features of the positions before `stop` are all here, or were handed on."""
        stock = self._stocks[request]
        there = stock.parts[-1].stop if stock.parts else stock.taken
        return there >= stop and all(part.is_here for part in stock.parts)

    def take(self, request: int, start: int, text: Sequence[int]) -> Tensor:
        """Features of the position before each token of the text from `start` on, [tokens, F], zeros before the first
        token of a text; the caller has seen that they are here, and keeps them: they are gone from here."""
        stock, first = self._stocks[request], max(0, start - 1)
        found = [part.found[max(0, first - part.start) :] for part in stock.parts if part.stop > first]
        stock.parts.clear()
        stock.taken = len(text) - 1
        return torch.cat([self._empty(0 if start else 1).zero_(), *found])

    def forget(self, request: int) -> None:
        """Give up all that is here or under way of a request; one that is not known is fine."""
        stock = self._stocks.pop(request, None)
        if stock is not None:
            self._give_up(stock.parts)

    def reset(self, incarnation: int) -> None:
        """A new life of this worker begins; nothing of the one before arrives."""
        self._transport.reset(incarnation)
        self._stocks.clear()

    def check(self, requests: Iterable[int]) -> None:
        """Prove that nothing is kept of other requests, and nothing is missing in between. Raises AssertionError."""
        stray = self._stocks.keys() - set(requests)
        assert not stray, f"features of requests {sorted(stray)}, which are not drafted for"
        for stock in self._stocks.values():
            for part, above in zip(stock.parts, [None, *stock.parts], strict=False):
                assert part.start == above.stop if above else part.start <= stock.taken, f"a gap at {part.start}"

    def _receive(self, message: Draft, source: FeatureTicket, stop: int) -> _Part:
        part = _Part(source.ticket, source.start, self._empty(stop - source.start))
        computed = self._aside.mark()  # what was launched on this memory before

        def buffer(positions: range) -> Tensor:
            computed()
            return part.found[positions.start - part.start : positions.stop - part.start]

        self._transport.receive(
            Incoming(
                source.ticket,
                End(source.peer, source.peer_incarnation),
                pieces(source.start, stop - source.start, self._width * self._dtype.itemsize),
                buffer,
                _written,
                lambda reason: self._later(partial(self._ended, message, part, reason)),
            )
        )
        return part

    def _ended(self, message: Draft, part: _Part, reason: str | None) -> list[TransferLost]:
        """A ticket is over. What came behind one that was lost is of no use: all of it will be sent again."""
        stock = self._stocks.get(message.request)
        if stock is None or part not in stock.parts:
            return []
        if reason is None:
            part.is_here = True
            return []
        at = stock.parts.index(part)
        self._give_up(stock.parts[at + 1 :])
        del stock.parts[at:]
        stock.lossy = True
        return [TransferLost(request=message.request, epoch=message.epoch, ticket=part.ticket, reason=reason)]

    def _give_up(self, parts: Iterable[_Part]) -> None:
        for part in parts:
            self._transport.close(part.ticket)

    def _empty(self, positions: int) -> Tensor:
        return torch.empty(positions, self._width, dtype=self._dtype, device=self._device)


def _written(positions: range, content: Tensor) -> None:
    """It was received where it stays."""
