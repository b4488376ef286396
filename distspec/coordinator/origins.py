"""Which futures the live part of a request's tree came from. Knows node ids and task numbers, nothing else."""

from __future__ import annotations

from bisect import bisect

from distspec.coordinator.notes import Kept
from distspec.speculation.tree import Step


class Origins:
    """For each live node: the draft that brought it, and the future whose verdict of it is law.

    Drafts bring runs of ids, each above those before, so only where runs begin is kept.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._drafts: list[int] = []
        self._verdicts: dict[int, int] = {}

    def drafted(self, task: int, nodes: range) -> None:
        """nodes: new ones, above all that were known."""
        self._starts.append(nodes.start)
        self._drafts.append(task)

    def judged(self, task: int, node: int) -> None:
        self._verdicts[node] = task

    def step(self, step: Step, accepted: bool) -> list[Kept]:
        """Who is to be thanked for a committed token; forgets what is dead."""
        thanked = [self._verdicts.pop(step.root, None)]
        if step.node is not None:
            thanked.append(self._draft_of(step.node))
        else:
            self._starts.clear()
            self._drafts.clear()
        for node in self._verdicts.keys() & step.died:
            del self._verdicts[node]
        return [Kept(task, accepted) for task in thanked if task is not None]

    def clear(self) -> None:
        self._starts.clear()
        self._drafts.clear()
        self._verdicts.clear()

    def _draft_of(self, heir: int) -> int | None:
        """Of the new root; forgets drafts that brought no id as high, since all below the root are higher."""
        at = bisect(self._starts, heir) - 1
        if at < 0:
            return None
        del self._starts[:at], self._drafts[:at]
        return self._drafts[0]
