"""What goes into the coordinator's machine and what comes out: values, so that a journal can replay them."""

from __future__ import annotations

from msgspec import Struct

from distspec.protocol.messages import (
    Cancel,
    Drafted,
    Fault,
    Freed,
    Hello,
    Order,
    Output,
    Progress,
    Received,
    Refused,
    Revoked,
    Submit,
    TransferLost,
    Verdict,
)


class _Event(Struct, frozen=True, tag=True, array_like=True):
    pass


class WorkerJoined(_Event, frozen=True):
    """A worker passed the handshake."""

    hello: Hello


class WorkerLeft(_Event, frozen=True):
    """A worker died, froze, left, or its link was reset: all its futures fail, nothing of it is trusted."""

    worker: str
    incarnation: int
    reason: str


class ClientLeft(_Event, frozen=True):
    """A client is gone: its requests are aborted."""

    client: str


class FromWorker(_Event, frozen=True):
    worker: str
    incarnation: int
    message: Verdict | Progress | Revoked | Freed | Refused | Received | TransferLost | Drafted | Fault


class FromClient(_Event, frozen=True):
    client: str
    message: Submit | Cancel


class Tick(_Event, frozen=True):
    """Time passed: deadlines are looked at. Sent every heartbeat_s."""


class Drain(_Event, frozen=True):
    """Take no new work to this worker and move what it holds elsewhere (scale-down)."""

    worker: str


class Thought(_Event, frozen=True):
    """Nobody waited for anything: so many pieces of what takes long were worked out meanwhile, each well below a
    millisecond. It changes what later events lead to, and leads to nothing itself."""

    pieces: int


Event = WorkerJoined | WorkerLeft | ClientLeft | FromWorker | FromClient | Tick | Drain | Thought


class ToWorker(_Event, frozen=True):
    worker: str
    message: Order


class ToClient(_Event, frozen=True):
    client: str
    message: Output


class Suspect(_Event, frozen=True):
    """This worker broke the protocol or missed a deadline: reset its link (a WorkerLeft follows)."""

    worker: str
    reason: str


Command = ToWorker | ToClient | Suspect
