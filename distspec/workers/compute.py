"""The one thread that computes in a worker, and what it computes with.

Everything a worker knows of requests belongs to this thread, so nothing there needs a lock. It blocks without
cost when there is nothing to do, and is woken by what arrives on its link: between two workers a thread that hands
messages on would be one more that has to wake. Knows when to look at its link, not what a link is made of.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from distspec.protocol.channel import Link
from distspec.protocol.messages import Message
from distspec.workers.bell import Bell

log = logging.getLogger(__name__)
Later = Callable[[], Sequence[Message]]
"""Something to be done on the compute thread; what it returns is sent."""


class Work(Protocol):
    """What a role does. All methods are called on the compute thread."""

    def receive(self, message: Message) -> Sequence[Message]:
        """Take a message of the coordinator; replies that need no computing."""

    def ready(self) -> bool:
        """`step` has something to do."""

    def hold_s(self) -> float:
        """Seconds for which a step that is ready is better put off, so that more can come before it; 0 for none."""

    def step(self) -> Sequence[Message]:
        """Compute once, over all that is ready."""

    def reset(self, incarnation: int) -> None:
        """Forget every request: a new life of this worker begins."""

    def check(self) -> None:
        """Prove the books. Raises AssertionError."""


@dataclass(frozen=True, slots=True)
class _Joined:
    link: Link


@dataclass(frozen=True, slots=True)
class _Proof:
    found: Future[None]


_Item = _Joined | _Proof | Message | Later | None


class Compute(threading.Thread):
    """reply(link, messages): sends what came of the life of that link. broke(link, error): that life is over.
    begin: comes before everything else. All are called on this thread; its links give what arrives to `take`, and
    have `wake` to say that there is something.
    """

    def __init__(
        self,
        work: Work,
        reply: Callable[[Link, Sequence[Message]], None],
        broke: Callable[[Link, Exception], None],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="compute", daemon=True)
        self._work, self._reply, self._broke, self._begin = work, reply, broke, begin
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._bell = Bell()
        self._link: Link | None = None

    def join_as(self, link: Link) -> None:
        """Begin the life of this link: what was taken before concerns the one before."""
        self._put(_Joined(link))

    def take(self, messages: Sequence[Message]) -> None:
        self._put(*messages)

    def wake(self) -> None:
        """Look at the link again."""
        self._bell.ring()

    def later(self, action: Later) -> None:
        self._put(action)

    def check(self) -> Future[None]:
        """Prove the books between two steps. Answered between two lives as well, and of whatever was left then."""
        proof = _Proof(Future())
        self._put(proof)
        return proof.found

    def stop(self) -> None:
        self._put(None)

    def is_called(self) -> bool:
        """Something has arrived for which a long step had better end. To be asked within a step."""
        if self._link is not None:
            self._link.receive()
        return not self._inbox.empty()

    def run(self) -> None:
        self._begin()
        while True:
            for item in self._arrived():
                if item is None:
                    return
                if isinstance(item, _Joined):
                    self._link = item.link
                    self._try(partial(self._reset, item.link.incarnation))
                elif isinstance(item, _Proof):
                    self._prove(item)
                else:
                    self._try(partial(self._handle, item))
            if self._pause_s() == 0:
                self._try(self._work.step)

    def _pause_s(self) -> float | None:
        """How long to wait for messages before the next step; None: for ever."""
        if self._link is not None:
            try:
                return self._work.hold_s() if self._work.ready() else None
            except Exception as error:
                self._end(self._link, error)
        return None

    def _put(self, *items: _Item) -> None:
        for item in items:
            self._inbox.put(item)
        if threading.get_ident() != self.ident:
            self._bell.ring()

    def _arrived(self) -> list[_Item]:
        """What there is to do, after a wait where there is nothing. A link is looked at before each wait as well: its
        descriptor says that something came since."""
        pause_s = self._pause_s()
        link = self._link
        if link is not None:
            link.receive()
        if pause_s != 0 and self._inbox.empty():
            self._bell.wait(pause_s, link.descriptor if link is not None else None)
            if link is not None:
                link.receive()
        items = list[_Item]()
        while not self._inbox.empty():
            items.append(self._inbox.get())
        return items

    def _handle(self, item: Message | Later) -> Sequence[Message]:
        return item() if callable(item) else self._work.receive(item)

    def _prove(self, proof: _Proof) -> None:
        try:
            self._work.check()
        except BaseException as error:
            proof.found.set_exception(error)
        else:
            proof.found.set_result(None)

    def _reset(self, incarnation: int) -> Sequence[Message]:
        self._work.reset(incarnation)
        return ()

    def _try(self, action: Later) -> None:
        """Within a life. Where the action breaks, or what it replies cannot be sent, that life is over: what is held of
        requests cannot be trusted until the next reset."""
        link = self._link
        if link is None:
            return
        try:
            if replies := action():
                self._reply(link, replies)
        except Exception as error:
            self._end(link, error)

    def _end(self, link: Link, error: Exception) -> None:
        log.error("the worker broke, and will begin anew", exc_info=error)
        self._link = None
        self._broke(link, error)
