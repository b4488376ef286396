"""Commands that look: at a running fleet, at a journal, at a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distspec.cli.options import Overrides

Name = Annotated[str, typer.Option(help="The fleet's name (`name` in its configuration).")]
RunningAddress = Annotated[str, typer.Option(help="The Ray cluster that the fleet runs on.")]


def check(
    config: Annotated[str, typer.Argument(help="A shipped configuration or a file.")], overrides: Overrides = None
) -> None:
    """Validate a configuration and print it with all defaults."""
    import msgspec
    import yaml

    from distspec.config import load

    resolved = load(config, overrides or ())
    typer.echo(yaml.safe_dump(msgspec.to_builtins(resolved), sort_keys=False), nl=False)


def replay(journal: Annotated[Path, typer.Argument(help="A file that coordinator.journal named.")]) -> None:
    """Run a coordinator's journal again: the same events must lead to the same commands."""
    from distspec.coordinator.replay import replay as run
    from distspec.errors import DistspecError

    try:
        result = run(journal)
    except OSError as error:
        raise DistspecError(f"{journal}: {error.strerror}") from None
    if result.divergence is None:
        typer.echo(f"term {result.term}: {result.events} events, all with the commands of the journal")
        return
    found = result.divergence
    typer.echo(f"term {result.term}: event {found.index} at {found.now_s:.6f} s led to other commands", err=True)
    typer.echo(f"event:    {found.event}", err=True)
    typer.echo(f"commands: {found.commands}", err=True)
    raise typer.Exit(1)


def status(name: Name = "distspec", address: RunningAddress = "auto") -> None:
    """Workers and requests of a running fleet."""


def trace(
    out: Annotated[Path, typer.Option(help="File to write, for ui.perfetto.dev.")],
    name: Name = "distspec",
    address: RunningAddress = "auto",
) -> None:
    """Where the time of a running fleet went, as a Perfetto trace."""
