"""What an event did that no command says: values for whoever watches, beside the commands.

The machine writes them, the observer reads them, and nothing else depends on them: they are in no journal.
"""

from __future__ import annotations

from msgspec import Struct


class Queued(Struct, frozen=True):
    """A request began to wait for a worker, for the first time or again."""

    request: int
    key: str


class Emitted(Struct, frozen=True):
    """Tokens of a request became final and went to its client."""

    request: int
    tokens: int


class Grown(Struct, frozen=True):
    """A proposal brought so many nodes that were not there before."""

    task: int
    nodes: int


class Kept(Struct, frozen=True):
    """One committed token came of this future: a verdict's outcome, or a draft's node.

    accepted: a drafted node that was sent to be judged carried it, as `Usage` counts them.
    """

    task: int
    accepted: bool


Note = Queued | Emitted | Grown | Kept
