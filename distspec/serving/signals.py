"""Signals that wait. Knows handlers of this process; does not know what must not be torn off."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Whoever handles SIGINT and SIGTERM hears of one that comes within the block when that has ended. A second one
    does not wait, should the block never end.

    Afterwards the handlers are again those from before, whatever the block has set. A signal without a handler in
    Python is left alone, and so are all where this is not the main thread, which alone may set any.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    came: list[int] = []

    def restore() -> None:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        assert callable(handler)
        handler(number, frame)

    def hold(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            restore()
            handle(number, frame)

    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, hold)
    try:
        yield
    finally:
        restore()
    if came:
        handle(came[0], None)
