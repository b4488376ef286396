"""What a thread waits at: a descriptor that others make readable, beside one that somebody else does.

Knows descriptors and time. Does not know what there is to do.
"""

from __future__ import annotations

import os
import select
import time
from contextlib import suppress

_DOZE_S = 1e-4
"""Sleep in a wait of less than a millisecond, of which `poll` knows no part."""


class Bell:
    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def ring(self) -> None:
        """From any thread: a wait ends, the next one if there is none."""
        os.eventfd_write(self._descriptor, 1)

    def wait(self, timeout_s: float | None, other: int | None = None) -> None:
        """Until it was rung since the last wait, the other descriptor is readable, or some time has passed, of which
        timeout_s is the most, None: for ever. It may return sooner, for nothing."""
        poll = select.poll()
        for descriptor in (self._descriptor, other):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        whole_ms = None if timeout_s is None else int(1e3 * timeout_s)
        if whole_ms == 0 and not poll.poll(0):
            time.sleep(min(_DOZE_S, timeout_s or 0.0))
        elif whole_ms != 0:
            poll.poll(whole_ms)
        with suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)
