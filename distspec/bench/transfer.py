"""How fast KV goes from one target worker to another, one prompt's alone and several one behind the other, beside what
their link carries bare; and how much of that a prompt's second token waits for when it goes while the rest of the
prompt is computed.

Knows workers, tickets and links of two processes. Does not know Ray or a coordinator: this file says to both workers
what one would say. The first process holds the source, on the first GPU; this one the destination, on the second. Times
of both are of one clock, the host's. Weights and prompts are random.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from msgspec import structs

from distspec import config
from distspec.bench.report import Row, machine, row
from distspec.engine import Engine
from distspec.errors import ConfigError, InvalidValue, TransferFailed
from distspec.kv.pool import KVPool
from distspec.models import load_model
from distspec.models.llama import Llama
from distspec.models.shapes import PREFIX, shape_folder
from distspec.protocol.messages import Drop, Extend, Message, Received, ReceiveKV, SendKV, Verdict
from distspec.protocol.values import SamplingParams
from distspec.rounds.desk import Desk
from distspec.transfer.collective import Collective
from distspec.transfer.group import Rendezvous
from distspec.transfer.links import link
from distspec.transfer.meeting import Board, Place, Served, Visited
from distspec.transfer.window import Window
from distspec.workers.target import TargetWork

HOST = "127.0.0.1"
BARE_BYTES = 256 << 20
_ABREAST = 8
"""So many tensors, or prompts, are under way at once where it is said how much a link carries."""
_WARM = 2
_TIMEOUT_S = 60.0
_PARAMS = SamplingParams(max_tokens=2, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """tokens: of a prompt. cuda: GPUs, else this processor in float32."""

    shape: str
    kinds: tuple[str, ...]
    tokens: int
    repetitions: int
    cuda: bool
    options: config.Engine

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.cuda else torch.float32

    def device(self, index: int) -> torch.device:
        return torch.device("cuda", index) if self.cuda else torch.device("cpu")


def measure(
    shape: str, kinds: Sequence[str], tokens: int, repetitions: int, options: config.Engine, gpus: bool
) -> list[Row]:
    """By each kind of link: GB/s of a prompt's KV, first word and last included, and of several prompts' under way at
    once, over bare ones; and milliseconds of a transfer that are left when its prefill has ended over those of a whole
    transfer. Raises ConfigError without two GPUs, if these are asked for, and for kinds that there are not;
    ModelNotFound."""
    if gpus and torch.cuda.device_count() < 2:
        raise ConfigError("engine.device", "bench transfer needs two CUDA devices; or --cpu")
    shape_folder(PREFIX + shape)
    known = ("ipc", "nccl", "gloo", "auto") if gpus else ("gloo", "auto")
    if not set(kinds) <= set(known):
        raise InvalidValue("kinds", ",".join(kinds), f"some of {', '.join(known)}")
    plan = Plan(shape, tuple(kinds), tokens, repetitions, gpus, options)
    here, there = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_source, args=(there, plan), daemon=True)
    child.start()
    there.close()  # or a child that breaks would be waited for
    try:
        side = Side("destination", plan, plan.device(1))
        return [row for kind in plan.kinds for row in _Meter(plan, kind, here, side).rows()]
    finally:
        with suppress(OSError):  # it broke
            here.send(None)
        child.join(_TIMEOUT_S)


class Side:
    """A target worker without its actor: what it says comes from `said`, and from the actions of its transport."""

    def __init__(self, name: str, plan: Plan, device: torch.device) -> None:
        self.name, self.device = name, device
        self.plan = plan
        if plan.cuda:
            torch.cuda.set_device(device)
        self.model: Llama = load_model(PREFIX + plan.shape, dtype=plan.dtype, device=device)
        chosen: dict[str, Any] = {"num_pages": (_ABREAST + 1) * plan.options.pages_for(plan.tokens)}
        chosen |= {"max_num_seqs": _ABREAST + 1, "prefix_cache": False, "cuda_graphs": False}
        options = structs.replace(plan.options, **chosen)
        self.engine = Engine(self.model, options, device=device, max_model_len=plan.tokens + 1)
        self.actions: queue.SimpleQueue[Callable[[], Sequence[Message]]] = queue.SimpleQueue()

    def meet(self, kind: str, pipe: Any) -> tuple[TargetWork, Collective, Place]:
        """A desk and a transport for links of this kind, and the peer's place."""
        desk = Desk(self.engine, None, max_num_batched_tokens=self.plan.options.max_num_batched_tokens, clock=time.time)
        places: dict[str, Place] = {}
        make = partial(link, kind, device=self.device, host=HOST, timeout_s=_TIMEOUT_S)
        transport = Collective(self.name, HOST, make, lambda end: places[end.worker], timeout_s=_TIMEOUT_S)
        transport.reset(1)
        pipe.send(transport.place)
        places["source" if self.name == "destination" else "destination"] = peer = pipe.recv()
        return TargetWork(self.engine, desk, transport, self.actions.put), transport, peer

    def synchronize(self) -> None:
        if self.plan.cuda:
            torch.cuda.synchronize(self.device)

    def bare(self, kind: str, board: Board, rank: int) -> float:
        """Seconds of one of several tensors of BARE_BYTES, one after the other."""
        store = Rendezvous(board, f"bare {kind}", _TIMEOUT_S)
        group = link(kind, store, rank, device=self.device, host=HOST, timeout_s=_TIMEOUT_S)
        assert not isinstance(group, Window)
        tensor = torch.randn(BARE_BYTES // 4, device=self.device)
        move = group.receive if rank else group.send
        self.synchronize()
        move(tensor)()
        began_s = time.perf_counter()
        pending = [move(tensor) for _ in range(_ABREAST)] if self.plan.cuda else []
        for wait in pending or [lambda: move(tensor)()] * _ABREAST:
            wait()
        took_s = (time.perf_counter() - began_s) / _ABREAST
        group.abort()
        return took_s


def _source(pipe: Any, plan: Plan) -> None:
    """What the other process does: an order at a time, until there is none."""
    side = Side("source", plan, plan.device(0))
    generator = torch.Generator().manual_seed(0)
    work, transport = None, None
    while (order := pipe.recv()) is not None:
        what, number = order
        prompt = tuple(torch.randint(side.model.config.vocab_size, (plan.tokens,), generator=generator).tolist())
        if what == "meet":
            work, transport, _ = side.meet(number, pipe)
        elif what == "bare":
            board = Served(HOST)
            pipe.send(board.place)
            side.bare(number, board, 0)
            board.close()
        elif what == "part":
            assert transport is not None
            transport.shutdown()
        else:
            assert work is not None
            pipe.send(_served(side, work, what, number, prompt))


def _served(side: Side, work: TargetWork, what: str, number: int, prompt: tuple[int, ...]) -> tuple[float, float]:
    """A prompt is computed, and its KV sent `during` that, `after` it, `sustained` or not at all (`alone`). When the
    prefill, or where that is over the transfer, began, and when the prefill ended."""
    sends = [_sent(number, ticket, len(prompt)) for ticket in _tickets(what, number)]
    side.synchronize()
    began_s = time.perf_counter()
    work.receive(Extend(request=number, epoch=0, task=number, start=0, tokens=prompt, params=_PARAMS))
    if what == "during":
        work.receive(sends[0])
    replies: list[Message] = []
    while not replies:
        replies += work.step()
    assert isinstance(replies[0], Verdict), replies
    ended_s = time.perf_counter()
    if what in ("after", "sustained"):
        began_s = time.perf_counter()
        for send in sends:
            work.receive(send)
    for _ in sends:
        side.actions.get(timeout=_TIMEOUT_S)()
    work.receive(Drop(request=number, epoch=0))
    return began_s, ended_s


def _tickets(what: str, number: int) -> range:
    """Of the prompt of that number; the destination's requests are numbered likewise."""
    return range(number, number + {"alone": 0, "sustained": _ABREAST}.get(what, 1))


def _sent(request: int, ticket: int, length: int) -> SendKV:
    return SendKV(
        request=request, epoch=0, ticket=ticket, peer="destination", peer_incarnation=1, start=0, length=length
    )


class _Meter:
    """One kind of link, seen from the destination."""

    def __init__(self, plan: Plan, kind: str, pipe: Any, side: Side) -> None:
        self._plan, self._kind, self._pipe, self._side = plan, kind, pipe, side
        self._number = 0

    def rows(self) -> list[Row]:
        plan, shape = self._plan, self._side.model.config
        bare_kind = ("nccl" if plan.cuda else "gloo") if self._kind in ("auto", "ipc") else self._kind
        bare_s = self._bare(bare_kind)
        self._pipe.send(("meet", self._kind))
        work, transport, _ = self._side.meet(self._kind, self._pipe)
        found = {what: self._taken(work, what) for what in ("alone", "after", "during", "sustained")}
        self._pipe.send(("part", 0))
        transport.shutdown()

        kept = (shape.num_layers, shape.num_kv_heads, shape.head_dim)
        size = plan.tokens * KVPool.position_bytes(*kept, plan.dtype, latent=shape.kv_latent)
        whole_s, sustained_s = (
            median(done_s - began_s for began_s, _, done_s in found[what]) for what in ("after", "sustained")
        )
        exposed_s = median(max(0.0, done_s - ended_s) for _, ended_s, done_s in found["during"])
        prefills = {
            f"prefill_{what}_ms": round(median(ended_s - began_s for began_s, ended_s, _ in found[what]) * 1e3, 2)
            for what in ("alone", "during")
        }
        context = machine("torch") | {"tokens": plan.tokens, "bytes": size, "bare": bare_kind} | prefills
        context |= {"chunk": plan.options.max_num_batched_tokens}
        if plan.cuda:
            context["gpu"] = torch.cuda.get_device_name()
        name = f"transfer/{plan.shape}/{self._kind}"
        return [
            row(f"{name}/whole", size / whole_s / 1e9, "GB/s", BARE_BYTES / bare_s / 1e9, context),
            row(f"{name}/sustained", _ABREAST * size / sustained_s / 1e9, "GB/s", BARE_BYTES / bare_s / 1e9, context),
            row(f"{name}/exposed", exposed_s * 1e3, "ms", whole_s * 1e3, context),
        ]

    def _bare(self, kind: str) -> float:
        self._pipe.send(("bare", kind))
        board = Visited(self._pipe.recv())
        return self._side.bare(kind, board, 1)

    def _taken(self, work: TargetWork, what: str) -> list[tuple[float, float, float]]:
        """Of each prompt, when its transfers or prefill began, when the prefill ended, and when its KV was here."""
        found = []
        for _ in range(self._plan.repetitions + _WARM):
            self._number += _ABREAST
            tickets, done_s = _tickets(what, self._number), 0.0
            for ticket in tickets:
                work.receive(self._expected(ticket))
            self._pipe.send((what, self._number))
            actions = []
            for _ in tickets:
                actions.append(self._side.actions.get(timeout=_TIMEOUT_S))
                done_s = time.perf_counter()
            for action in actions:
                [said] = action()
                if not isinstance(said, Received):
                    raise TransferFailed(str(said))
            for ticket in tickets:
                work.receive(Drop(request=ticket, epoch=0))
            found.append((*self._pipe.recv(), done_s))
        return found[_WARM:]

    def _expected(self, number: int) -> ReceiveKV:
        length = self._plan.tokens
        return ReceiveKV(
            request=number,
            epoch=0,
            ticket=number,
            peer="source",
            peer_incarnation=1,
            start=0,
            length=length,
            tokens=(1,) * length,
            params=_PARAMS,
        )
