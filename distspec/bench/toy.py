"""Workers whose work takes no time, or a time that they sleep: they answer by a rule over the last token.

Knows the messages that a coordinator sends in a bench. Keeps no books of KV, and takes the compute thread and the
link of a real worker.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence

from distspec.protocol.channel import Link
from distspec.protocol.keys import Endpoint
from distspec.protocol.messages import (
    Draft,
    Drafted,
    Drop,
    Extend,
    Fault,
    Freed,
    Hello,
    Lease,
    Message,
    Progress,
    Received,
    ReceiveKV,
    SendKV,
    Verdict,
)
from distspec.protocol.values import ROOT, finish_reason
from distspec.workers.compute import Compute

WORKERS = ("decode:0", "draft:0", "verify:0")
VOCAB_SIZE = 1009
_WRONG_EVERY = 5
"""One draft of so many is wrong, so that nodes die and drop lists are sent."""


def outcome(token: int) -> int:
    """What the toy target says after a token."""
    return (7 * token + 3) % VOCAB_SIZE


class Toy:
    """forward_s: how long a step sleeps, as a host does beside a device; busy_s: how long all of them did."""

    def __init__(self) -> None:
        self.forward_s = self.busy_s = 0.0

    def forward(self) -> None:
        if self.forward_s:
            began_s = time.perf_counter()
            time.sleep(self.forward_s)
            self.busy_s += time.perf_counter() - began_s


class ToyTarget(Toy):
    """A Work: verdicts, and leased rounds of one token, each of which waits for `go`."""

    def __init__(self) -> None:
        super().__init__()
        self._extends: deque[Extend] = deque()
        self._leases: dict[int, tuple[Lease, int, int]] = {}  # and the last token, and how many were emitted
        self._may_go = False

    def go(self) -> Sequence[Message]:
        """Run the next leased round."""
        self._may_go = True
        return ()

    def receive(self, message: Message) -> Sequence[Message]:
        match message:
            case Extend():
                self._extends.append(message)
                return ()
            case Lease():
                self._leases[message.request] = message, message.tokens[-1], message.emitted
                return ()
            case Drop():
                self._leases.pop(message.request, None)
                return (Freed(request=message.request, epoch=message.epoch),)
            case ReceiveKV():
                return (Received(request=message.request, epoch=message.epoch, ticket=message.ticket),)
            case SendKV():
                return ()
        return (Fault(reason=f"{type(message).__name__} is nothing for a toy"),)

    def ready(self) -> bool:
        return bool(self._extends or (self._leases and self._may_go))

    def hold_s(self) -> float:
        return 0.0

    def step(self) -> Sequence[Message]:
        self.forward()
        replies: list[Message] = [_verdict(extend) for extend in self._extends]
        self._extends.clear()
        if self._leases and self._may_go:
            self._may_go = False
            replies += [self._round(request) for request in list(self._leases)]
        return replies

    def reset(self, incarnation: int) -> None:
        self._extends.clear()
        self._leases.clear()

    def check(self) -> None: ...

    def _round(self, request: int) -> Progress:
        lease, last, emitted = self._leases.pop(request)
        assert lease.params is not None
        token = outcome(last)
        ended = finish_reason(lease.params, emitted + 1, token)
        if ended is None:
            self._leases[request] = lease, token, emitted + 1
        return Progress(
            request=request,
            epoch=lease.epoch,
            start=emitted,
            tokens=(token,),
            drafted=(0,),
            accepted=(0,),
            ended=ended,
            span=_now(),
        )


class ToyDrafter(Toy):
    """A Work: chains of what the toy target will say, but for one token now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[int, list[int]] = {}
        self._drafts: deque[Draft] = deque()

    def receive(self, message: Message) -> Sequence[Message]:
        if isinstance(message, Draft):
            self._texts.setdefault(message.request, [])[message.keep :] = message.tokens
            self._drafts.append(message)
            return ()
        assert isinstance(message, Drop)
        self._texts.pop(message.request, None)
        return (Freed(request=message.request, epoch=message.epoch),)

    def ready(self) -> bool:
        return bool(self._drafts)

    def hold_s(self) -> float:
        return 0.0

    def step(self) -> Sequence[Message]:
        self.forward()
        replies = [self._drafted(draft) for draft in self._drafts if draft.request in self._texts]
        self._drafts.clear()
        return replies

    def reset(self, incarnation: int) -> None:
        self._texts.clear()
        self._drafts.clear()

    def check(self) -> None: ...

    def _drafted(self, draft: Draft) -> Drafted:
        token, tokens = self._texts[draft.request][-1], []
        for _ in range(draft.shape.steps):
            token = outcome(token) if token % _WRONG_EVERY else 0
            tokens.append(token)
        return Drafted(
            request=draft.request,
            epoch=draft.epoch,
            task=draft.task,
            base=len(self._texts[draft.request]),
            tokens=tuple(tokens),
            parents=tuple(range(ROOT, len(tokens) - 1)),
            span=_now(),
        )


class ToyWorker:
    """A toy on the compute thread of a real worker, joined by a real link. name: `role:index`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.role = name.partition(":")[0]
        self.work: ToyTarget | ToyDrafter = ToyDrafter() if self.role == "draft" else ToyTarget()

    async def join(self, endpoint: Endpoint, timeout_s: float) -> None:
        """Raises LinkLost."""
        self._loop = asyncio.get_running_loop()
        self._compute = Compute(self.work, Link.say, self._broke)
        self._compute.start()
        hello = Hello(
            worker=self.name,
            role=self.role,
            incarnation=1,
            fingerprint={},
            slots=16,
            capacity=1 << 20,
            page_size=16,
            max_model_len=1 << 18,
            vocab_size=VOCAB_SIZE,
        )
        self._link = Link(
            endpoint,
            hello,
            1,
            arrived=self._compute.take,
            lost=lambda error: None,
            timeout_s=timeout_s,
            wake=self._compute.wake,
        )
        self._compute.join_as(self._link)
        await self._link.open()

    def go(self) -> None:
        """Let a target run its next leased round."""
        if isinstance(self.work, ToyTarget):
            self._compute.later(self.work.go)

    def close(self) -> None:
        self._compute.stop()
        self._link.close()

    def _broke(self, link: Link, error: Exception) -> None:
        self._loop.call_soon_threadsafe(link.close)


def _verdict(extend: Extend) -> Verdict:
    root = [(ROOT, outcome(extend.tokens[-1]))] if extend.tokens else []
    nodes = [(node.id, outcome(node.token)) for node in extend.nodes]
    return Verdict(
        request=extend.request, epoch=extend.epoch, task=extend.task, outcomes=tuple(root + nodes), span=_now()
    )


def _now() -> tuple[float, float]:
    now_s = time.time()
    return now_s, now_s
