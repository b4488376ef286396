"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

ConfigName = Annotated[str, typer.Option("--config", help="A shipped configuration (local, colocated) or a file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, as pools.verify.replicas=2.", show_default=False),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="A running Ray cluster (auto: this machine's). Without it and without RAY_ADDRESS, one is started.",
        show_default=False,
    ),
]
