"""What messages carry: a request's wishes and costs, the shape of a tree, a node of one.

Frozen msgspec Structs without a tag, encoded as arrays. Knows nothing of who says them to whom.
"""

from __future__ import annotations

from msgspec import Struct

ROOT = -1
"""Parent of a node that hangs on the last committed token; node id of that token in verdicts."""


class _Value(Struct, frozen=True, array_like=True, kw_only=True):
    pass


class Constraint(_Value, frozen=True):
    """What the output must be. kind: "json_object" (any JSON object; text is empty), "json_schema", "regex", "grammar"
    (EBNF as xgrammar reads it) or "structural_tag"; text: the schema or tag as JSON, the expression, the grammar."""

    kind: str
    text: str = ""


class TokenLogprobs(_Value, frozen=True):
    """Of one token of the text: its logprob, its rank among all tokens (1: the likeliest), and the likeliest tokens
    with theirs, the best first, as many as were asked for."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class SamplingParams(_Value, frozen=True):
    """How tokens are drawn. Resolved: the seed is set, stop ids include the model's own.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off. choice is the index of n > 1.
    max_tokens counts all output tokens of the stream, also those resubmitted after a failure; so does min_tokens,
    before which no stop id is drawn. prompt_tokens: of the text, from the first on; what follows is output.

    In the order in which they change the logits: constraint; allowed_token_ids (empty: all), bad_words (token sequences
    that the output may not hold) and min_tokens; logit_bias; repetition_penalty (of tokens in prompt or output),
    presence_penalty and frequency_penalty (in the output), counted over the text before the token, drafts included;
    then temperature, top_k, top_p, min_p. logprobs, prompt_logprobs: how many of the likeliest tokens are reported at
    each token of the output, or of the prompt; None reports nothing, 0 the token itself.
    """

    max_tokens: int
    seed: int = 0
    choice: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None


class SpeculationChoice(_Value, frozen=True):
    """What a request may choose for itself; None leaves the server's default."""

    policy: str | None = None
    num_speculative_tokens: int | None = None


class Usage(_Value, frozen=True):
    """What a request cost and how speculation went; times in seconds of the coordinator's clock.

    rounds: verdicts that committed something; hits: those that ended on a token that was drafted already, so that the
    draft of the next round had begun. drafted, accepted: nodes judged on the committed path's
    rounds, and those kept. synthetic: tokens and guesses were made up (speculation.synthetic_acceptance).
    position_drafted[i], position_accepted[i]: the same by depth in the round.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    position_drafted: tuple[int, ...] = ()
    position_accepted: tuple[int, ...] = ()
    policy: str = ""
    first_token_s: float = 0.0
    total_s: float = 0.0
    synthetic: bool = False
    hits: int = 0


class Shape(_Value, frozen=True):
    """How a drafter is to grow its tree of a request.

    steps: forwards of the drafter, in addition to what was grown before. In each, the `width` best nodes that have
    no children yet (the end of the text counts as one) get their `topk` best guesses as children. nodes: most
    nodes of the tree; depth: most levels below the end of the text. odds[rank]: how often a guess of that rank is
    right, by which nodes are compared (a static tree); empty: they are compared by the drafter's own confidence
    (a dynamic tree, as in EAGLE-2, arXiv 2406.16858). quick: the fallback drafter is to answer, at once.
    """

    steps: int
    topk: int = 1
    width: int = 1
    nodes: int = 64
    depth: int = 64
    odds: tuple[float, ...] = ()
    quick: bool = False


class FeatureTicket(_Value, frozen=True):
    """Features of the text's positions from `start` on, to its last but one, come from this peer under this ticket."""

    ticket: int
    peer: str
    peer_incarnation: int
    start: int


class Node(_Value, frozen=True):
    """One speculated token: parent is a node id, or ROOT."""

    id: int
    parent: int
    token: int


def finish_reason(params: SamplingParams, emitted: int, token: int) -> str | None:
    """Why the stream ends with `token`, the emitted-th output token (counted from 1), or None.

    The one rule of the coordinator and of leased rounds alike.
    """
    if token in params.stop_token_ids:
        return "stop"
    return "length" if emitted >= params.max_tokens else None
