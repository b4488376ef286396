"""The sizes of a round, by the names of SGLang and vLLM where these have one.

Knows no policy: which of them a policy heeds, `policies` says.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """steps: levels that are drafted before a round is judged (num_steps). topk: ranks that are judged. nodes: most
    drafted nodes in a submission (num_draft_tokens without the root). lookahead: drafter steps of one growth while a
    forward is in flight; for `dsi` also the nodes of a submission. fan: guesses per node when branches are grown
    beside the judged tree. width: nodes that a drafter step expands then. live: most live nodes of the tree.
    early: drafted nodes that are enough to send a further verifier off (`bvsp`).
    """

    steps: int
    topk: int = 1
    nodes: int = 8
    lookahead: int = 2
    fan: int = 3
    width: int = 8
    live: int = 64
    early: int = 16
