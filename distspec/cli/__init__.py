"""The command `distspec`.

Knows commands and how errors look on a terminal. Imports nothing heavy: Ray, torch and transformers come in
with the commands that need them, so that `--help` and `check` answer at once.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from distspec.cli import bench, generate, inspect, serve
from distspec.errors import ConfigError, DistspecError, ModelNotFound

app = typer.Typer(
    help="Speculative decoding for LLM serving on Ray, distributed and overlapped.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve.serve)
app.command()(generate.generate)
app.command()(inspect.status)
app.command()(inspect.trace)
app.command()(inspect.replay)
app.command()(inspect.check)
app.add_typer(bench.app, name="bench")


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(version("distspec"))
        raise typer.Exit


@app.callback()
def everywhere(
    is_asked: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """What every command takes; it is done by its callback."""


def main() -> None:
    """Entry point. Exit status 2: the command line, the configuration or a model it names; 1: anything else of ours."""
    try:
        app()
    except DistspecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError | ModelNotFound) else 1)
