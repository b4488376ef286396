"""Policies side by side in the simulator: rows of every cell of batch, acceptance and verifiers.

Knows cells and names of rows. Does not know how a policy is run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context

from distspec.bench import simulate
from distspec.bench.report import Context, Row, machine, row
from distspec.bench.simulate import CHAINS, TREES, Cell
from distspec.errors import InvalidValue
from distspec.sim.timed import Measured

FIGURES = {
    "s/token": "token_s",
    "accepted/round": "accepted",
    "hit rate": "hits",
    "target busy": "target_busy",
    "drafter busy": "draft_busy",
    "wasted nodes": "wasted",
}
"""What rows of policies tell beside tokens per second: keys of their contexts, as `Measured` has them, by title."""


@dataclass(frozen=True, slots=True)
class Job:
    policy: str
    curves: str
    cell: Cell
    tokens: int
    trees: bool = False

    @property
    def place(self) -> str:
        cell = self.cell
        return f"b{cell.batch}/a{cell.odds[0]:g}/v{cell.verifiers}"

    @property
    def synthetic(self) -> Context:
        return {"synthetic": ",".join(f"{share:.4g}" for share in self.cell.odds)}

    @property
    def name(self) -> str:
        return f"sim/{self.policy}/{self.place}{'/t64' if self.trees else ''}"


def odds(acceptance: float) -> tuple[float, ...]:
    """Of the drafter's guesses: the second and third are right in half and a sixth of what the first leaves."""
    return acceptance, (1 - acceptance) / 2, (1 - acceptance) / 6


def chances(acceptance: str | None, synthetic: str | None) -> list[tuple[float, ...]]:
    """How often guesses of each rank are right, by what the options of these names say. Raises InvalidValue."""
    if synthetic is None:
        return [odds(rate) for rate in numbers("acceptance", "0.5,0.7,0.9" if acceptance is None else acceptance, 0, 1)]
    if acceptance is not None:
        raise InvalidValue(
            "synthetic", synthetic, "no acceptance beside it: it says how often the first guess is right"
        )
    shares = numbers("synthetic", synthetic, 0, 1)
    if sum(shares) > 1:
        raise InvalidValue("synthetic", synthetic, "numbers that add up to at most 1")
    return [shares]


def numbers(option: str, text: str, least: float, most: float | None = None) -> tuple[float, ...]:
    """What an option lists, separated by commas. Raises InvalidValue."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(least <= value <= (sys.float_info.max if most is None else most) for value in values):
        span = f"from {least:g} on" if most is None else f"from {least:g} to {most:g}"
        raise InvalidValue(option, text, f"numbers {span}, separated by commas")
    return values


def counts(option: str, text: str) -> list[int]:
    """Whole numbers from 1 that an option lists. Raises InvalidValue."""
    values = numbers(option, text, 1)
    if not all(value.is_integer() for value in values):
        raise InvalidValue(option, text, "whole numbers from 1 on, separated by commas")
    return [int(value) for value in values]


def simulated(
    curves: str,
    batches: Sequence[int],
    chances: Sequence[tuple[float, ...]],
    verifiers: Sequence[int],
    tokens: int,
    trees: bool,
) -> list[Row]:
    """Tokens per second of every policy in every cell, each at its best sizes, against `ar` of the same cell.

    tokens: of a run that counts, of all its requests together. chances: how often guesses of each rank are right, one
    tuple per cell. Rows are named `sim/{policy}/b{batch}/a{acceptance}/v{verifiers}`, and end in `/t64` where trees of
    64 nodes are judged. Raises InvalidValue for unknown curves.
    """
    simulate.hardware(curves)
    jobs = [job for cell in product(batches, chances, verifiers) for job in _jobs(curves, Cell(*cell), tokens, trees)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        measured = dict(zip(jobs, pool.map(_measure, jobs), strict=True))
    plain = {job.cell: figures.tokens_s for job, (_, figures) in measured.items() if job.policy == "ar"}
    here = machine("msgspec") | {"reference": "ar of the same cell", "curves": curves}
    return [
        row(job.name, figures.tokens_s, "tokens/s", plain[job.cell], here | job.synthetic | sizes | asdict(figures))
        for job, (sizes, figures) in measured.items()
    ]


def _jobs(curves: str, cell: Cell, tokens: int, trees: bool) -> Iterator[Job]:
    yield from (Job(policy, curves, cell, tokens) for policy in CHAINS)
    if trees:
        yield from (Job(policy, curves, cell, tokens, trees=True) for policy in TREES)


def _measure(job: Job) -> tuple[simulate.Sizes, Measured]:
    return simulate.measure(job.policy, simulate.hardware(job.curves), job.cell, job.trees, job.tokens)
