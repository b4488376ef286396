"""The fleet lease: a process that nobody renews ends by itself, so that none is left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)
_LAST_S = 5.0


def end_unless_claimed(after_s: float) -> threading.Timer:
    """Ends this process after after_s, unless cancelled: whoever made it may have died before it told what to do.

    A thread, because there is no event loop yet, and because none may keep it.
    """
    timer = threading.Timer(after_s, _unclaimed, (after_s,))
    timer.daemon = True
    timer.start()
    return timer


def _unclaimed(after_s: float) -> None:
    log.warning("nobody initialized this actor within %g s: it ends", after_s)
    os._exit(0)


class FleetLease:
    """Ends this process when `renewed_s` lies more than the lease's length in the past.

    heard_s: event loop time of what else shows that the fleet lives, such as the last frame of a link.
    last: what is still to be done before the end.
    """

    def __init__(
        self,
        length_s: float,
        *,
        what: str,
        heard_s: Callable[[], float] = lambda: 0.0,
        last: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._length_s, self._heard_s, self._what, self._last = length_s, heard_s, what, last
        self._until = self._loop.time() + length_s
        self._watch = asyncio.create_task(self._expire())

    def renew(self, length_s: float | None = None) -> None:
        """From now on, for the lease's length; or for another, while something long is under way."""
        self._until = self._loop.time() + (length_s or self._length_s)

    async def _expire(self) -> None:
        while True:
            left_s = max(self._until, self._heard_s() + self._length_s) - self._loop.time()
            if left_s <= 0:
                break
            await asyncio.sleep(min(left_s, self._length_s / 4))
        log.warning("the fleet lease lapsed: this %s ends", self._what)
        try:
            if self._last is not None:
                await asyncio.wait_for(self._last(), _LAST_S)
        finally:
            os._exit(0)  # nothing here is worth saving, and nothing may keep it
