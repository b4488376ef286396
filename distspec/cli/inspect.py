"""Commands that look: at a running fleet, at a journal, at a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distspec.cli.options import Overrides, Pictures

if TYPE_CHECKING:
    from distspec.trace import Span
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
    out: Pictures,
    request: Annotated[
        int | None,
        typer.Option(
            help="The request's number, as `status` shows it. Without it, the newest in a .png and all in a .json.",
            show_default=False,
        ),
    ] = None,
    name: Name = None,
    address: RunningAddress = "auto",
) -> None:
    """Where the time of a running fleet went, and which of its work was kept."""
    import asyncio

    with _attached(name, address) as fleet:
        spans = asyncio.run(fleet.trace())
    for path in out:
        typer.echo(_write_trace(spans, request, path))


def _write_trace(spans: Sequence[Span], request: int | None, path: Path) -> str:
    """Write the file; returns what it shows. Raises DistspecError if nothing is known of the request."""
    from distspec.errors import DistspecError
    from distspec.trace import newest, write

    is_picture = path.suffix == ".png"
    if is_picture and request is None:
        request = newest(spans)
    shown = [span for span in spans if request is None or span.request == request]
    if not shown and (is_picture or request is not None):
        known = {span.request for span in spans if span.request is not None}
        there = f"{min(known)} to {max(known)}" if known else "none"
        asked = "any request" if request is None else f"request {request}"
        raise DistspecError(f"nothing is traced of {asked}; requests that are: {there}")
    if is_picture:
        from distspec.bench.timeline import draw

        draw(shown, path)
    else:
        write(shown, path)
    return f"{len(shown)} spans{f' of request {request}' if request is not None else ''} -> {path}"


@contextmanager
def _attached(name: str | None, address: str) -> Iterator[FleetHandle]:
    """The fleet of that name, or the only one that runs. Raises FleetError."""
    from distspec.serving.cluster import cluster, only_fleet
    from distspec.workers.fleet import attach

    with cluster(address):
        yield attach(name or only_fleet())
