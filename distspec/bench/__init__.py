"""Measurements of a fleet's parts, each against a peer or a bound of the same run.

Knows commands; what they measure comes in with them, since most of it imports torch or Ray.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from distspec.cli.options import ConfigName, Overrides

app = typer.Typer(
    help="Measure on this machine; every command compares with a peer or a bound of the same run.",
    no_args_is_help=True,
    add_completion=False,
)

Json = Annotated[Path | None, typer.Option("--json", help="File to write the rows to, as a JSON list.")]


@app.callback()
def bench() -> None:
    """One command each, also while there is one."""


@app.command("offline")
def measure_offline(
    against: Annotated[Literal["transformers"], typer.Option(help="The peer.")] = "transformers",
    model: Annotated[str | None, typer.Option(help="Instead of the configuration's model.name.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="Of torch, for both sides; 0: all cores.")] = 0,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each side, in turn; medians count.")] = 5,
    fleet: Annotated[bool, typer.Option("--fleet", help="Also through a fleet of one decode worker.")] = False,
    config: ConfigName = "local",
    json: Json = None,
    overrides: Overrides = None,
) -> None:
    """Tokens per second of plain decoding, at batch 1 and 8, without a server."""
    from distspec.workers.threads import spin_briefly

    spin_briefly()  # as workers do; the peer has the same
    from distspec.bench.offline import measure
    from distspec.bench.report import report
    from distspec.config import load

    chosen = [*(overrides or ()), *([f"model.name={model}"] if model else [])]
    report(measure(load(config, chosen), threads, tokens, repetitions, through_fleet=fleet), json)


@app.command("overhead")
def measure_overhead(
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of a run, about.")] = 1000,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each policy, in turn; medians count.")] = 5,
    json: Json = None,
) -> None:
    """Milliseconds that coordinator and channel add to a round: workers that need no time, on real sockets."""
    from distspec.bench.overhead import measure
    from distspec.bench.report import report

    report(measure(rounds, repetitions), json)
