"""The sizes of a round, by the names of the configuration, or of SGLang and vLLM, where these mean the same.

Knows no policy: which of them a policy heeds, `policies` says.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """steps: levels that are drafted before a round is judged (num_speculative_tokens, which may be a table or left
    open). topk: ranks that are judged. nodes: most drafted nodes in a submission (num_draft_tokens less the root).
    lookahead: drafter steps of one growth while a forward is in flight; for `dsi` also the nodes of a submission.
    branch_topk: guesses per node when branches are grown beside the judged tree. branch_width: nodes that a drafter
    step expands then. branch_nodes: drafted nodes that are enough to send a further verifier off (`bvsp`).
    max_live_nodes: of the tree.
    """

    steps: int
    topk: int = 1
    nodes: int = 8
    lookahead: int = 2
    branch_topk: int = 3
    branch_width: int = 8
    branch_nodes: int = 16
    max_live_nodes: int = 64
