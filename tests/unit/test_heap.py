"""What a process keeps costs its collector nothing."""

from __future__ import annotations

import gc
import weakref

from distspec import heap


class _Node:
    def __init__(self) -> None:
        self.self = self


def test_what_is_there_is_not_looked_at_again_and_what_comes_is_collected() -> None:
    kept = [_Node() for _ in range(1000)]
    lost = weakref.ref(_Node())
    try:
        heap.settle()
        assert lost() is None
        assert not any(isinstance(one, _Node) for one in gc.get_objects())
        later = weakref.ref(_Node())
        gc.collect()
        assert later() is None
        assert len(kept) == 1000
    finally:
        gc.unfreeze()
