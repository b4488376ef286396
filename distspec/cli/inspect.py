"""Commands that look: at a running fleet, at a journal, at a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distspec.cli.options import Overrides

if TYPE_CHECKING:
    from distspec.workers.fleet import FleetHandle

Name = Annotated[
    str | None,
    typer.Option(help="The fleet (`name` in its configuration), if several run.", show_default=False),
]
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


def status(name: Name = None, address: RunningAddress = "auto") -> None:
    """Workers and requests of a running fleet."""
    import asyncio

    from rich.console import Console
    from rich.table import Table

    with _attached(name, address) as fleet:
        found = asyncio.run(fleet.status())
    console = Console()
    counters = ", ".join(f"{count} {what}" for what, count in found["counters"].items())
    console.print(f"fleet [bold]{found['name']}[/bold] serves {found['model']}, term {found['term']}: {counters}")
    workers = Table(
        "worker", "state", "host", "open", "slots", "lives", "trouble", title="workers", title_justify="left"
    )
    for worker, known in found["supervision"].items():
        joined = found["workers"].get(worker, {})
        cells = (worker, known["state"], joined.get("node", "-"), joined.get("open", "-"), joined.get("slots", "-"))
        workers.add_row(*map(str, (*cells, known["lives"], known["trouble"])))
    console.print(workers)
    requests = Table("request", "state", "policy", "tokens", "output", "on", title="requests", title_justify="left")
    for number, request in found["requests"].items():
        on = ", ".join(request["workers"])
        requests.add_row(
            str(number), request["state"], request["policy"], str(request["tokens"]), str(request["emitted"]), on
        )
    if found["requests"]:
        console.print(requests)
    console.print(f"{len(found['requests'])} requests open, {found['queued']} of them queued")


def trace(
    out: Annotated[Path, typer.Option(help="File to write, for ui.perfetto.dev.")],
    name: Name = None,
    address: RunningAddress = "auto",
) -> None:
    """Where the time of a running fleet went, as a Perfetto trace."""
    import asyncio

    from distspec.trace import write

    with _attached(name, address) as fleet:
        spans = asyncio.run(fleet.trace())
    write(spans, out)
    typer.echo(f"{len(spans)} spans -> {out}")


@contextmanager
def _attached(name: str | None, address: str) -> Iterator[FleetHandle]:
    """The fleet of that name, or the only one that runs. Raises FleetError."""
    from distspec.serving.cluster import cluster, only_fleet
    from distspec.workers.fleet import attach

    with cluster(address):
        yield attach(name or only_fleet())
