"""Which futures the live part of a request's tree came from. Knows node ids and task numbers, nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from distspec.coordinator.notes import Kept
from distspec.speculation.tree import Step


class Origins:
    """For each live node: the draft that brought it, and the future whose verdict of it is law."""

    def __init__(self) -> None:
        self._drafts: dict[int, int] = {}
        self._verdicts: dict[int, int] = {}

    def drafted(self, task: int, nodes: Iterable[int]) -> None:
        self._drafts.update(dict.fromkeys(nodes, task))

    def judged(self, task: int, node: int) -> None:
        self._verdicts[node] = task

    def step(self, step: Step, accepted: bool) -> list[Kept]:
        """Who is to be thanked for a committed token; forgets what is dead."""
        thanked = [self._verdicts.pop(step.root, None)]
        if step.node is not None:
            thanked.append(self._drafts.pop(step.node, None))
        for node in step.died:
            self._drafts.pop(node, None)
            self._verdicts.pop(node, None)
        return [Kept(task, accepted) for task in thanked if task is not None]

    def clear(self) -> None:
        self._drafts.clear()
        self._verdicts.clear()
