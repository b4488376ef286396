"""A draft worker's work: a desk that drafts, and the features that come to it, as the compute thread of a worker wants
it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distspec.drafters.base import Drafter
from distspec.protocol.messages import Draft, Drop, Fault, Message
from distspec.rounds.arrivals import Arrivals
from distspec.rounds.drafting import DraftDesk


class DraftWork:
    """clock: wall time in seconds, for spans. quick: the fallback drafter, if there is one. arrivals: of
    features, for a drafter that wants them. prove: that the device of the drafter computes; raises what that says.
    """

    def __init__(
        self,
        drafter: Drafter,
        clock: Callable[[], float],
        quick: Drafter | None = None,
        arrivals: Arrivals | None = None,
        prove: Callable[[], None] = lambda: None,
    ) -> None:
        self._prove = prove
        self._arrivals = arrivals
        self._desk = DraftDesk(drafter, clock, quick, arrivals=arrivals)

    def receive(self, message: Message) -> Sequence[Message]:
        if isinstance(message, Draft | Drop):
            return self._desk.receive(message)
        return [Fault(reason=f"{type(message).__name__} is nothing for a draft worker")]

    def ready(self) -> bool:
        return self._desk.ready()

    def hold_s(self) -> float:
        return 0.0  # its steps are short

    def step(self) -> Sequence[Message]:
        said = self._desk.step()
        if any(isinstance(one, Fault) for one in said):
            self._prove()  # a drafter that broke costs its drafts, a device that did costs this life
        return said

    def reset(self, incarnation: int) -> None:
        if self._arrivals is not None:
            self._arrivals.reset(incarnation)
        self._desk.reset()

    def check(self) -> None:
        self._desk.check()
