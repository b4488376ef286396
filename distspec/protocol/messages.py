"""The messages of the channel: who says what to whom.

Everything is a tagged, frozen msgspec Struct, encoded as a MessagePack array. The coordinator is in the middle: clients
(ingress, drivers) and workers (target, draft) talk to it and never to each other; KV and features go from worker to
worker by `transfer/`, never through here. Fields whose name ends with _s, spans and steps are seconds.

`request` is the coordinator's short number of a request (unique within a term). `epoch` grows whenever all speculative
work of a request became void. `task` is a future's number, unique within a term. Node ids are never reused within a
request. Links are first-in, first-out: a worker handles the messages of one request in the order they were sent, so the
coordinator knows at sending time what the worker will hold.
"""

from __future__ import annotations

from msgspec import Struct

from distspec.protocol.values import (
    FeatureTicket,
    Node,
    SamplingParams,
    Shape,
    SpeculationChoice,
    TokenLogprobs,
    Usage,
)

PROTOCOL_VERSION = 1


class _Message(Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    pass


# -- client <-> coordinator ------------------------------------------------------------------


class ClientHello(_Message, frozen=True):
    """A client joins; `version` must be PROTOCOL_VERSION."""

    client: str
    version: int


class ClientWelcome(_Message, frozen=True):
    """A client is taken in, for this life of the coordinator."""

    term: int
    heartbeat_s: float


class Submit(_Message, frozen=True):
    """A request, or the rest of one whose coordinator died: `emitted` are its committed tokens so far."""

    key: str
    prompt: tuple[int, ...]
    params: SamplingParams
    emitted: tuple[int, ...] = ()
    speculation: SpeculationChoice = SpeculationChoice()


class Cancel(_Message, frozen=True):
    """Nobody reads this stream any more; one that is not known has ended."""

    key: str


class Output(_Message, frozen=True):
    """Tokens start .. start+len(tokens) of the stream. A finish_reason makes it the terminal message.

    finish_reason: "stop" | "length" | "abort" | "error". error: (code, message, field).
    usage: so far, since a client may end the stream at any token (a stop string is text, which only it sees).
    logprobs: of each of the tokens, empty where they were not asked for. prompt_logprobs: of the prompt's tokens from
    the second on, where asked for, see codec.pack_logprobs; they come once, with the first token.
    """

    key: str
    start: int
    tokens: tuple[int, ...]
    finish_reason: str | None = None
    error: tuple[str, str, str | None] | None = None
    usage: Usage | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: bytes = b""


# -- worker <-> coordinator: joining -----------------------------------------------------------


class Hello(_Message, frozen=True):
    """A worker joins. fingerprint: what must agree in a fleet, by name (version, model, dtype, pages...).

    role: prefill | decode | verify | draft. slots: requests it can hold. capacity: KV tokens.
    step_cost[i]: measured time of a decode step of 2**i rows, in units of one row (empty: not measured).
    drafts: it can draft (a draft worker, or a target with a local drafter).
    """

    worker: str
    role: str
    incarnation: int
    fingerprint: dict[str, str]
    slots: int
    capacity: int
    page_size: int
    max_model_len: int
    vocab_size: int
    step_cost: tuple[float, ...] = ()
    drafts: bool = False
    node: str = ""


class Welcome(_Message, frozen=True):
    """A worker is taken in."""

    term: int
    heartbeat_s: float


class Refuse(_Message, frozen=True):
    """The coordinator does not take this peer; reason names what differs."""

    reason: str


class Heartbeat(_Message, frozen=True):
    """Either way, every heartbeat_s; the coordinator's renews the worker's fleet lease."""


# -- coordinator -> target worker -----------------------------------------------------------


class Extend(_Message, frozen=True):
    """Compute committed tokens and judge nodes: prefill, decode and verification alike.

    In order: keep the nodes in `commit` (they became committed, oldest first), free those in `drop`, append `tokens` at
    position `start` (which must then be the committed length), add `nodes` below. Answered by one Verdict with the
    outcome after the last committed token (node ROOT, if `tokens` is not empty) and after each node, or by Refused.
    params come with the first Extend or Lease of a request on this worker. A `start` above 0 of a request that is not
    open here gets no answer: it was given up, and that was said already.
    """

    request: int
    epoch: int
    task: int
    start: int
    tokens: tuple[int, ...] = ()
    nodes: tuple[Node, ...] = ()
    commit: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()
    params: SamplingParams | None = None


class Lease(_Message, frozen=True):
    """Run rounds on your own from here (local drafter), and stream Progress until the request ends.

    Committed work as in Extend; never carries nodes. `emitted` of the committed tokens are output. shape: of the
    drafter's tree in a round, of which the best `nodes` are judged; None is plain decoding.
    """

    request: int
    epoch: int
    start: int
    tokens: tuple[int, ...]
    commit: tuple[int, ...] = ()
    drop: tuple[int, ...] = ()
    emitted: int = 0
    shape: Shape | None = None
    nodes: int = 0
    params: SamplingParams | None = None


class Withdraw(_Message, frozen=True):
    """The verdicts of these tasks are not wanted any more: what of their nodes is not computed yet is left out.

    Each task is still answered by its Verdict, with the outcomes that there are; committed tokens are computed as
    they would have been. A node that was left out may still be named in a later `drop`.
    """

    request: int
    epoch: int
    tasks: tuple[int, ...]


class Revoke(_Message, frozen=True):
    """End the lease; answered by Revoked after the rounds in flight have drained."""

    request: int
    epoch: int


class Drop(_Message, frozen=True):
    """Forget a request: abort what runs, close its tickets, free its pages.

    Answered by Freed, unless the request is not open here: then it was given up, and that was said already. An opening
    (first Extend, Lease or ReceiveKV) is ended by exactly one of Freed, Refused or a TransferLost that says freed, so a
    credit returns once.
    """

    request: int
    epoch: int


class SendKV(_Message, frozen=True):
    """Send KV of committed positions [start, start+length) to `peer` under this ticket.

    Positions that an Extend before this message brought and that are not computed yet are sent as they are. If the
    request is let go before, the ticket ends.
    """

    request: int
    epoch: int
    ticket: int
    peer: str
    peer_incarnation: int
    start: int
    length: int


class SendFeatures(_Message, frozen=True):
    """Send the features of positions [start, start+length) of the text to `peer`, a draft worker, under this ticket.

    All of them are computed here. nodes: for the last of them, the node that each was or still is here, if it was one:
    a Draft follows a verdict at once, and what that accepted is committed here by the next Extend only. Nothing is
    said when they are sent; where they cannot be, TransferLost.
    """

    request: int
    epoch: int
    ticket: int
    peer: str
    peer_incarnation: int
    start: int
    length: int
    nodes: tuple[int, ...] = ()


class ReceiveKV(_Message, frozen=True):
    """Reserve pages and receive under this ticket; answered by Received or TransferLost.

    tokens are the committed tokens [0, start+length): the worker's books and prefix cache need them.
    """

    request: int
    epoch: int
    ticket: int
    peer: str
    peer_incarnation: int
    start: int
    length: int
    tokens: tuple[int, ...]
    params: SamplingParams


# -- target worker -> coordinator ---------------------------------------------------------------


class Verdict(_Message, frozen=True):
    """Outcomes of one Extend, as (node id, token) pairs. span: wall clock start and end of its steps.

    cached: committed tokens that the prefix cache already held. step: rows and seconds of its last step, those of
    other requests included (0 rows: it took none). logprobs: of each outcome, where the params ask for them;
    prompt_logprobs: as in Output, of an Extend that opens the request with its prompt and nothing else.
    """

    request: int
    epoch: int
    task: int
    outcomes: tuple[tuple[int, int], ...]
    cached: int = 0
    span: tuple[float, float] = (0.0, 0.0)
    step: tuple[int, float] = (0, 0.0)
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: bytes = b""


class Progress(_Message, frozen=True):
    """Committed tokens of a leased request, at output positions start .. (gap-free, in order).

    accepted[i], drafted[i]: of the i-th round in this message. ended: the lease ended by stop or length. step: as
    in Verdict. drafting: the span in which the drafter of this worker made its nodes, empty without any. Where both
    models worked without the host between them nobody knows whose time it was: drafting is empty, the step's 0.
    """

    request: int
    epoch: int
    start: int
    tokens: tuple[int, ...]
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    ended: str | None = None
    span: tuple[float, float] = (0.0, 0.0)
    step: tuple[int, float] = (0, 0.0)
    drafting: tuple[float, float] = (0.0, 0.0)
    logprobs: tuple[TokenLogprobs, ...] = ()


class Revoked(_Message, frozen=True):
    """The lease is over; the stream's output length is final. computed: committed KV length held."""

    request: int
    epoch: int
    length: int
    computed: int


class Freed(_Message, frozen=True):
    """Nothing of this request is left here; its credit returns."""

    request: int
    epoch: int


class Refused(_Message, frozen=True):
    """The request was given up here for want of pages or slots, and everything of it freed. Doubles as Freed. reason
    "constraint": what its output must be cannot be compiled, here or elsewhere. task: the future that ends with it, if
    any."""

    request: int
    epoch: int
    reason: str
    task: int | None = None


class Received(_Message, frozen=True):
    """All of a ticket is in the pages here. span: from its order to its end."""

    request: int
    epoch: int
    ticket: int
    span: tuple[float, float] = (0.0, 0.0)


class TransferLost(_Message, frozen=True):
    """A ticket failed on this side. freed: the receiver says it, nothing of the request is left here (as Freed)."""

    request: int
    epoch: int
    ticket: int
    reason: str
    freed: bool = False


# -- coordinator <-> draft worker ----------------------------------------------------------------


class Draft(_Message, frozen=True):
    """Cut your text of this request to `keep` tokens, append `tokens`, then grow the tree below its end.

    The text is committed tokens only. The drafter keeps its tree while the text follows it, and drops what the text
    left behind. params as in Extend. Answered by Drafted, unless the request was given up, or its next Draft came
    before this one was answered. features: where those come from that a drafter needs which reads them, and does not
    have yet; it waits for them. From `start` on they replace what was to come by earlier tickets. One that fails is
    answered by TransferLost, and the draft waits for the next Draft.
    """

    request: int
    epoch: int
    task: int
    keep: int
    tokens: tuple[int, ...]
    shape: Shape
    params: SamplingParams | None = None
    features: FeatureTicket | None = None


class Drafted(_Message, frozen=True):
    """The whole tree below the first `base` tokens of the text: parents[i] < i, or ROOT; siblings come in the order of
    their rank. scores[i]: log-probability of node i given its parent, as the drafter sees it (empty: it has no
    opinion). step: as in Verdict, of the drafter.
    """

    request: int
    epoch: int
    task: int
    base: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...] = ()
    span: tuple[float, float] = (0.0, 0.0)
    step: tuple[int, float] = (0, 0.0)


class Fault(_Message, frozen=True):
    """Something broke in a worker that goes on: logged and counted by the coordinator."""

    reason: str


Order = Extend | Lease | Withdraw | Revoke | Drop | SendKV | SendFeatures | ReceiveKV | Draft
"""What the coordinator's machine asks of workers; the rest keeps the link."""

ToWorker = Welcome | Refuse | Heartbeat | Order
FromWorker = (
    Hello | Heartbeat | Verdict | Progress | Revoked | Freed | Refused | Received | TransferLost | Drafted | Fault
)
ToClient = ClientWelcome | Refuse | Heartbeat | Output
FromClient = ClientHello | Heartbeat | Submit | Cancel
Message = ToWorker | FromWorker | ToClient | FromClient
