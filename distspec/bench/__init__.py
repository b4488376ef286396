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


@app.command("policies")
def measure_policies(
    simulate: Annotated[str, typer.Option(help="Curves that ship with the package, as h200-32b-0.6b.")],
    batch: Annotated[str, typer.Option(help="Numbers of requests that run at once.")] = "1,8,64",
    acceptance: Annotated[str, typer.Option(help="How often the drafter's first guess is right.")] = "0.5,0.7,0.9",
    verifiers: Annotated[str, typer.Option(help="Numbers of target workers.")] = "1,2,4",
    synthetic: Annotated[
        str | None, typer.Option(help="Instead of --acceptance: of the first, second, third guess, as 0.8,0.1,0.03.")
    ] = None,
    trees: Annotated[bool, typer.Option("--trees", help="Also with trees of 64 nodes.")] = False,
    tokens: Annotated[int, typer.Option(min=60, help="Of the run that counts, of all its requests together.")] = 6000,
    png: Annotated[Path | None, typer.Option(help="File to draw the speed-ups to.")] = None,
    json: Json = None,
) -> None:
    """Tokens per second of every policy at its own best sizes, in virtual time: no worker is started."""
    from distspec.bench.policies import draw, numbers, odds, simulated
    from distspec.bench.report import report

    rates = numbers("acceptance", acceptance, 0, 1)
    chances = [numbers("synthetic", synthetic, 0, 1)] if synthetic else [odds(rate) for rate in rates]
    sizes = [[int(n) for n in numbers(name, text, 1)] for name, text in (("batch", batch), ("verifiers", verifiers))]
    rows = simulated(simulate, sizes[0], chances, sizes[1], tokens, trees)
    report(rows, json)
    if png is not None:
        draw(rows, png)
