"""Tokens per second of rounds on one GPU, target and drafter side by side, beside what memory and products allow.

Knows engines, rounds and bytes. Does not know requests, workers or how books are kept beyond lengths and pages. Weights
are random, so outcomes and guesses are made up (distspec.synthetic); all forwards and draws run in full. Speeds are of
the tokens that a round brings on average at this acceptance: few rounds bring some more or less. A round is bound by
the bytes that its forwards read over the copy bandwidth of the same run, or by their products over the rate of a large
one, whichever takes longer for each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from msgspec.structs import replace

from distspec import config
from distspec.bench.engine import CONTEXT, HALF, step_bytes
from distspec.bench.kernels import copy_bandwidth, timed
from distspec.bench.report import Context, Row, machine, row
from distspec.bench.trace import Trace
from distspec.constraints import Grammars
from distspec.engine import Begun, Engine, Flight, Rolling
from distspec.errors import ConfigError, InvalidValue
from distspec.models import load_model
from distspec.models.llama import Llama
from distspec.models.shapes import PREFIX
from distspec.protocol.values import SamplingParams
from distspec.rounds.loop import needs_host

FIGURES = {
    "ms": "round_ms",
    "tokens": "tokens_per_round",
    "over ar": "over_ar",
    "unused": "unused",
    "idle": "idle",
    "between": "between",
}
"""Columns of the table: of a round its time, and the tokens that a request was seen to get; speed over plain decoding
of the same batch; the share of a round in which no kernel runs, as their own times say and as the profiler sees it; and
what of that lies between two rounds."""

WARM = 6
_TRACED = 12
_MATRIX = 8192


@dataclass(frozen=True, slots=True)
class Cell:
    """steps: drafts of a round, 0 for plain decoding; overlap: the next round is launched before one is read."""

    batch: int
    steps: int
    overlap: bool

    @property
    def name(self) -> str:
        policy = f"sd{self.steps}" if self.steps else "ar"
        return f"{policy}/b{self.batch}" + ("" if self.overlap else "/waits")


@dataclass(frozen=True, slots=True)
class Rates:
    """Of this device: bytes copied per second, read and written; multiply-adds of a large product, times 2."""

    bytes_s: float
    flops_s: float

    def seconds(self, model: Llama, requests: int, rows: int) -> float:
        """A forward of so many rows, at least."""
        weights = sum(
            t.numel() for name, t in model.weights.items() if name != "embedding" or model.config.tie_embeddings
        )
        return max(step_bytes(model, requests) / self.bytes_s, 2 * weights * rows / self.flops_s)


def named(pair: str) -> tuple[str, str]:
    """The models of a pair: target, drafter. Raises InvalidValue if it is none."""
    target, _, drafter = pair.partition("+")
    if not target or not drafter or "+" in drafter:
        raise InvalidValue("pairs", pair, "a target and a drafter, as TARGET+DRAFTER")
    return target, drafter


def measure(
    pairs: Sequence[str],
    batches: Sequence[int],
    steps: Sequence[int],
    acceptance: float,
    rounds: int,
    options: config.Engine,
) -> list[Row]:
    """Every batch with every number of drafts, and plain decoding, of pairs `TARGET+DRAFTER` of `random:` shapes.
    Raises ConfigError without CUDA, and for a pair that is none."""
    models = {pair: named(pair) for pair in pairs}
    if not torch.cuda.is_available():
        raise ConfigError("engine.device", "bench round needs a CUDA device")
    device = torch.device("cuda")
    rates = Rates(copy_bandwidth(device), matrix_rate(device))
    context = machine("torch", "triton") | {"gpu": torch.cuda.get_device_name(), "context": CONTEXT}
    context |= {"copy_bandwidth_gb_s": round(rates.bytes_s / 1e9), "matrix_tflop_s": round(rates.flops_s / 1e12)}
    context |= {"synthetic_acceptance": acceptance}
    cells = [Cell(*sizes) for sizes in product(batches, (0, *steps), (True, False))]
    found = []
    for pair, shapes in models.items():
        target, drafter = (load_model(PREFIX + shape, dtype=HALF, device=device) for shape in shapes)
        room = CONTEXT + (rounds + _TRACED + 2 * WARM) * (max(steps) + 1)
        sized = replace(options, max_num_seqs=max(batches), num_pages=max(batches) * options.pages_for(room))
        bench = Rounds(target, drafter, sized, acceptance, device, max_model_len=room)
        found += list(_rows(pair, bench, cells, acceptance, rounds, rates, context))
        del target, drafter, bench
        torch.cuda.empty_cache()
    return found


def matrix_rate(device: torch.device) -> float:
    """Multiply-adds per second, times 2, of a large product in half precision."""
    left, right = torch.randn(2, _MATRIX, _MATRIX, dtype=HALF, device=device)
    return 2 * _MATRIX**3 / (timed([lambda: left @ right]) * 1e-6)


def _rows(
    pair: str, bench: Rounds, cells: Sequence[Cell], acceptance: float, rounds: int, rates: Rates, context: Context
) -> Iterator[Row]:
    plain: dict[tuple[int, bool], float] = {}
    for cell in cells:
        seconds, tokens = bench.timed(cell, rounds)
        launch_s, trace = bench.traced(cell)
        expected = sum(acceptance**i for i in range(cell.steps + 1))
        speed = cell.batch * expected / seconds
        if not cell.steps:
            plain[cell.batch, cell.overlap] = speed
        bound = rates.seconds(bench.models[0], cell.batch, cell.batch * (cell.steps + 1))
        bound += cell.steps * rates.seconds(bench.models[1], cell.batch, cell.batch)
        own: Context = {
            "round_ms": seconds * 1e3,
            "tokens_per_round": tokens,
            "over_ar": speed / plain[cell.batch, cell.overlap],
            "unused": 1 - trace.busy_s() / seconds,
            "idle": trace.idle(),
            "between": trace.idle_between(),
            "launch_ms": launch_s * 1e3,
        }
        yield row(f"round/{pair}/{cell.name}", speed, "tokens/s", cell.batch * expected / bound, context | own)


GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class Rounds:
    """A target and a drafter that go on from random texts of CONTEXT tokens, over keys and values that are random
    too. acceptance None: outcomes and guesses are the models' own. grammars: of their vocabulary."""

    def __init__(
        self,
        target: Llama,
        drafter: Llama,
        options: config.Engine,
        acceptance: float | None,
        device: torch.device,
        max_model_len: int,
        grammars: Grammars | None = None,
    ) -> None:
        self.models = (target, drafter)
        self.target, self.drafter = (
            Engine(model, options, device=device, max_model_len=max_model_len, grammars=grammars)
            for model in (target, drafter)
        )
        self._rolling = Rolling(self.target, self.drafter, odds=() if acceptance is None else (acceptance,))
        self._slots: dict[int, tuple[int, int]] = {}  # by slot of the target: that of the drafter, and the root
        for engine in (self.target, self.drafter):
            engine.pool.data.normal_()

    def timed(
        self, cell: Cell, rounds: int, asks: SamplingParams = GREEDY, root: int | None = None
    ) -> tuple[float, float]:
        """Seconds of a round, and tokens that it brought a request, on average over so many. asks: of each request, but
        for its seed; root: the first token of the output, which is there already, None for any."""
        self._enter(cell.batch, asks, root)
        self._run(cell, WARM)
        start = time.perf_counter()
        tokens = self._run(cell, rounds)
        seconds = time.perf_counter() - start
        self._leave()
        return seconds / rounds, tokens / rounds / cell.batch

    def traced(self, cell: Cell) -> tuple[float, Trace]:
        """Seconds that the host needs to launch a round, and what the device did meanwhile."""
        self._enter(cell.batch)
        self._run(cell, WARM)
        with Trace() as trace:
            self._run(cell, _TRACED)
        start = time.perf_counter()
        flight = self._launch(cell)
        seconds = time.perf_counter() - start
        self._read(flight)
        self._leave()
        return seconds, trace

    def _run(self, cell: Cell, rounds: int) -> int:
        """So many rounds, from a device that does nothing to one that does nothing; how many tokens they brought."""
        flight, tokens = self._launch(cell), 0
        for _ in range(rounds - 1):
            if not cell.overlap:
                tokens += self._read(flight)
            later = self._begin(cell)
            if cell.overlap:
                tokens += self._read(flight)
            flight = self._finished(later)
        return tokens + self._read(flight)

    def _enter(self, batch: int, asks: SamplingParams = GREEDY, root: int | None = None) -> None:
        generator = torch.Generator().manual_seed(batch)
        for seed in range(batch):
            params = replace(asks, seed=seed, prompt_tokens=CONTEXT - 1)
            tokens = torch.randint(self.target.model.config.vocab_size, (CONTEXT,), generator=generator).tolist()
            tokens[-1] = tokens[-1] if root is None else root
            slots = []
            for engine in (self.target, self.drafter):
                slot = engine.open((), params, use_cache=False)
                engine.reserve(slot, CONTEXT)
                engine.sequence(slot).append(tokens[:-1])
                slots.append(slot)
            self._rolling.enter(slots[0], tokens[-1], slots[1])
            self._slots[slots[0]] = (slots[1], tokens[-1])

    def _leave(self) -> None:
        for slot, (draft, _) in self._slots.items():
            self._rolling.leave(slot)
            self.target.close(slot, keep=False)
            self.drafter.close(draft, keep=False)
        self._slots.clear()

    def _launch(self, cell: Cell) -> Flight:
        return self._finished(self._begin(cell))

    def _finished(self, one: Begun | Flight) -> Flight:
        return self._rolling.finish(one, one.slots) if isinstance(one, Begun) else one

    def _begin(self, cell: Cell) -> Begun | Flight:
        """As much of a round as needs nothing of those before."""
        for slot, (draft, _) in self._slots.items():
            reach = self._rolling.reach(slot, cell.steps)
            self.target.reserve(slot, reach - self.target.sequence(slot).length)
            self.drafter.reserve(draft, reach - self.drafter.sequence(draft).length)
        staged = any(needs_host(self.target.params(slot)) for slot in self._slots)
        return (self._rolling.begin if staged else self._rolling.launch)(list(self._slots), cell.steps)

    def _read(self, flight: Flight) -> int:
        """Into the books."""
        count = 0
        for slot, tokens in zip(flight.slots, flight.read(), strict=True):
            draft, root = self._slots[slot]
            for engine, own in ((self.target, slot), (self.drafter, draft)):
                engine.sequence(own).append((root, *tokens[:-1]))
            self._slots[slot] = (draft, tokens[-1])
            count += len(tokens)
        return count
