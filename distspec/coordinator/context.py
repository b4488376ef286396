"""What the handlers of the machine share: requests, credits, numbers, and the commands they return.

Knows how a request is opened and closed on a worker. Decides nothing.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter

from msgspec import Struct, structs

from distspec.coordinator import events
from distspec.coordinator.admission import Credits
from distspec.coordinator.notes import Emitted, Note, Queued
from distspec.coordinator.planner import Planner
from distspec.coordinator.request import Drafting, Holding, Request, State, Task
from distspec.errors import RequestError
from distspec.protocol.messages import (
    Drop,
    Order,
    Output,
)
from distspec.speculation.sizes import Sizes


class Settings(Struct, frozen=True, kw_only=True):
    """What the machine is told once; a journal carries it.

    local_drafts: drafting happens inside the decode worker. features: the drafter reads features, wherever it runs.
    steps: drafted levels of a round (num_speculative_tokens), or a table of them as (most requests that run, steps) in
    ascending order; None: from the measured step cost.
    topk, lookahead, branch_topk, branch_width, branch_nodes, max_live_nodes: as in `Sizes`. nodes None: of a
    chain steps, or more where more is drafted and worth its rows; of a tree max_live_nodes, and with the root no more
    than room. room: most scratch nodes of a request on a worker. static: trees are ranked by how often guesses of each
    rank were right, not by the drafter's confidence. quick: there is a fallback drafter. synthetic: tokens are made up.
    """

    policy: str = "sd"
    allowed_policies: tuple[str, ...] = ("ar", "sd", "pearl", "dsi", "ssd", "bvsp", "auto")
    local_drafts: bool = False
    features: bool = False
    steps: int | tuple[tuple[int, int], ...] | None = None
    topk: int = 1
    nodes: int | None = None
    lookahead: int = 2
    branch_topk: int = 3
    branch_width: int = 8
    max_live_nodes: int = 64
    branch_nodes: int = 16
    static: bool = True
    quick: bool = False
    synthetic: bool = False
    room: int = 64
    max_queued_requests: int = 256
    task_timeout_s: float = 120.0
    unavailable_s: float = 60.0


MOST_STEPS = 16
"""Drafted levels of a round, and nodes of a submission of `dsi`, that `auto` goes to."""


def _bounds(settings: Settings) -> Sizes:
    """What `auto` stays within."""
    return Sizes(
        steps=min(MOST_STEPS, settings.room),
        topk=settings.topk,
        nodes=settings.room,
        lookahead=min(MOST_STEPS, settings.room),
        branch_topk=max(settings.branch_topk, settings.topk),
        branch_width=settings.branch_width,
        max_live_nodes=settings.max_live_nodes,
        branch_nodes=settings.branch_nodes,
    )


class Context:
    """The books of the machine. `now`, `out` and `notes` belong to the event being handled."""

    def __init__(self, settings: Settings, term: int) -> None:
        self.settings, self.term = settings, term
        self.credits = Credits()
        self.requests: dict[int, Request] = {}
        self.keys: dict[tuple[str, str], int] = {}
        self.queue: list[int] = []
        self.counters: Counter[str] = Counter()
        self.heard: dict[str, float] = {}
        self.decoder_seen_s: float | None = None
        self._tried, self._kept = 10, 6
        self.planner = Planner(_bounds(settings))
        self.now = 0.0
        self.out: list[events.Command] = []
        self.notes: list[Note] = []
        self._number = 0
        self._future = 0

    def number(self) -> int:
        """A request number, unique within the term."""
        self._number += 1
        return self._number

    def future(self) -> int:
        """A task or ticket number, unique within the term."""
        self._future += 1
        return self._future

    def is_future(self, number: int) -> bool:
        """Whether a task or ticket of this number was ever opened."""
        return 0 < number <= self._future

    @property
    def acceptance(self) -> float:
        """How often the right token is among the guesses of a level that are judged, if those above were right; from a
        prior of ten levels.

        One number over all requests and the whole term: what the fleet is told, and how deep `speculation.length` goes
        where nothing else says it. `Planner.odds` cannot be that: it tells classes and ranks apart and forgets, so that
        `auto` follows each class, while depths that follow it would change with whoever asked last.
        """
        return self._kept / self._tried

    def learn(self, *, tried: int, kept: int) -> None:
        """Levels of drafts that the walk reached, and in how many of them it kept one of the ranks that are judged."""
        self._tried += tried
        self._kept += kept

    # -- commands --------------------------------------------------------------------------

    def send(self, worker: str, message: Order) -> None:
        self.out.append(events.ToWorker(worker, message))

    def suspect(self, worker: str, reason: str) -> None:
        self.counters["suspects"] += 1
        self.out.append(events.Suspect(worker, reason))

    def refuse(self, client: str, key: str, error: RequestError, start: int = 0) -> None:
        """The terminal message of a request that is not served."""
        self.counters["refused"] += 1
        what = (error.code, error.message, error.field)
        output = Output(key=key, start=start, tokens=(), finish_reason="error", error=what)
        self.out.append(events.ToClient(client, output))

    def emit(self, request: Request, start: int, reason: str | None) -> None:
        """Output tokens from `start` on; with a reason, the terminal message."""
        tokens = tuple(request.tokens[request.prompt_length + start :])
        if not tokens and reason is None:
            return
        if tokens:
            request.refusals = 0
            if request.tally.first_s is None:
                request.tally.first_s = self.now
            self.notes.append(Emitted(request.number, len(tokens)))
        usage = structs.replace(request.usage(self.now), synthetic=self.settings.synthetic)
        output = Output(
            key=request.key,
            start=start,
            tokens=tokens,
            finish_reason=reason,
            usage=usage,
            logprobs=tuple(request.logprobs),
            prompt_logprobs=request.prompt_logprobs,
        )
        request.logprobs, request.prompt_logprobs = [], b""
        self.out.append(events.ToClient(request.client, output))
        self.counters["tokens"] += len(tokens)

    # -- opening and closing on workers ----------------------------------------------------

    def reserve(self, request: Request, worker: str) -> Holding:
        """Take a credit for this request; nothing is sent yet."""
        self.credits.take(worker, request.number, len(request.tokens))
        hold = request.holds[worker] = Holding(epoch=request.epoch)
        return hold

    def close(self, request: Request, worker: str) -> None:
        """Drop a request from a target worker; its futures there are void."""
        hold = request.holds.pop(worker)
        self.forget_tasks(request, worker)
        request.unfeed(worker)
        self._release(request, worker, hold.opened)

    def lose(self, request: Request, worker: str) -> None:
        """A target worker holds nothing of the request any more, by its own word or its death."""
        request.holds.pop(worker, None)
        self.forget_tasks(request, worker)
        request.unfeed(worker)
        self.credits.close(worker, request.number)

    def forget_tasks(self, request: Request, worker: str) -> None:
        for number in [n for n, task in request.tasks.items() if task.worker == worker]:
            del request.tasks[number]

    def attach_drafter(self, request: Request, worker: str) -> None:
        """Bind a drafter. One inside the home worker needs no credit of its own."""
        if worker != request.home:
            self.credits.take(worker, request.number, len(request.tokens))
        request.drafting = Drafting(worker=worker, epoch=request.epoch)

    def detach_drafter(self, request: Request) -> None:
        draft, request.drafting = request.drafting, None
        if draft is not None and draft.worker not in request.holds:
            self._release(request, draft.worker, draft.opened)

    def _release(self, request: Request, worker: str, opened: bool) -> None:
        """End an opening: a worker that was asked says itself that it is free, else the credit is back at once."""
        self.credits.close(worker, request.number)
        if worker not in self.credits.workers:
            return
        if opened:
            self.send(worker, Drop(request=request.number, epoch=request.epoch))
        else:
            self.credits.give_back(worker)

    # -- the queue -------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """In order of arrival, so what was preempted goes first."""
        insort(self.queue, request.number)
        self.notes.append(Queued(request.number, request.key))

    def requeue(self, request: Request) -> None:
        """Everything computed for it is given up; its committed tokens stay. The drafter is kept."""
        request.move(State.QUEUED)
        draft = request.drafting
        if draft is not None and draft.worker in request.holds:
            request.drafting = None
        request.void()
        for worker in list(request.holds):
            self.close(request, worker)
        request.home = request.prefiller = None
        request.avoid.clear()
        self.enqueue(request)
        self.counters["requeued"] += 1

    def forget(self, request: Request) -> None:
        """The terminal message was said: free everything everywhere."""
        was_queued = request.state is State.QUEUED
        request.move(State.DONE)
        for worker, hold in request.holds.items():
            self.credits.prefixes.note(worker, request.tokens[: hold.computed])
        self.detach_drafter(request)
        for worker in list(request.holds):
            self.close(request, worker)
        if was_queued:
            self.queue.remove(request.number)
        del self.requests[request.number]
        del self.keys[request.client, request.key]

    def open_task(self, request: Request, worker: str, nodes: tuple[int, ...]) -> int:
        """A future for these nodes. To be opened before the books of what the worker will hold are changed."""
        number = self.future()
        base = request.holds[worker].said
        request.tasks[number] = Task(worker, request.tree.root, nodes, base, self.now)
        return number
