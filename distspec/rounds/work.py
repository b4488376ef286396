"""What a worker has to compute for one request: tokens first, nodes below them, in as many steps as it takes.

Knows what is left and which outcomes came back. Does not know pages, budgets or other requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from itertools import islice

from distspec.engine import Outcome, Segment
from distspec.protocol.messages import Extend, Lease
from distspec.protocol.values import ROOT, Node, SamplingParams, TokenLogprobs


class Work:
    """An Extend, or (see Round) one round of a lease.

    tokens: committed, their KV not computed yet; `length` of them at first. nodes: not judged yet.
    outcomes: (node id, token) so far, the one of ROOT first. judged: nodes that have theirs. arrival orders
    works; waited: steps in a row that had no room for it. drafted: the drafter was asked for this round; drafting: from
    when to when it then worked. step: rows, and seconds, of the last step that it took part in. logprobs: of the
    outcomes, where the slot asks for them. gives: those of its own tokens are to be told; given: these, so far.
    """

    def __init__(
        self,
        message: Extend | Lease,
        tokens: Seq[int],
        arrival: int,
        cached: int = 0,
        nodes: Seq[Node] = (),
        gives: bool = False,
    ) -> None:
        self.message = message
        self.tokens = deque(tokens)
        self.length = len(tokens)
        self.nodes = deque(nodes)
        self.outcomes: list[tuple[int, int]] = []
        self.logprobs: list[TokenLogprobs] = []
        self.gives = gives
        self.given: list[TokenLogprobs] = []
        self.judged: list[Node] = []
        self.arrival = arrival
        self.cached = cached
        self.waited = 0
        self.drafted = False
        self.drafting = (0.0, 0.0)
        self.began_s: float | None = None
        self.step = (0, 0.0)

    @property
    def rows(self) -> int:
        """Rows of a step that are left to compute."""
        return len(self.tokens) + len(self.nodes)

    def undraft(self) -> bool:
        """Judge no nodes; whether there were any left."""
        had = bool(self.nodes)
        self.nodes.clear()
        return had

    def segment(self, slot: int, rows: int) -> Segment:
        """The next `rows` rows (or what is left) as a segment of a step; nothing is taken off yet."""
        tokens = tuple(self.tokens)[:rows]
        nodes = tuple(self.nodes)[: rows - len(tokens)]
        given = tuple(islice(self.tokens, 1, rows + 1)) if self.gives else ()
        return Segment(slot=slot, tokens=tokens, nodes=nodes, want=len(tokens) == len(self.tokens), given=given)

    def absorb(self, segment: Segment, outcome: Outcome[int], began_s: float, step: tuple[int, float]) -> None:
        """A segment was computed in a step that began at began_s."""
        for _ in segment.tokens:
            self.tokens.popleft()
        for _ in segment.nodes:
            self.judged.append(self.nodes.popleft())
        if outcome.root is not None:
            self.outcomes.append((ROOT, outcome.root))
        self.outcomes += [(node.id, token) for node, token in zip(segment.nodes, outcome.nodes, strict=True)]
        self.logprobs += outcome.logprobs
        self.given += outcome.given
        self.began_s = began_s if self.began_s is None else self.began_s
        self.step = step


def gives_prompt(message: Extend | Lease, params: SamplingParams) -> bool:
    """Whether logprobs of a prompt are to be told: a message brings it, and nothing that was drawn after it already."""
    whole = isinstance(message, Extend) and not message.start and len(message.tokens) == params.prompt_tokens
    return whole and params.prompt_logprobs is not None
