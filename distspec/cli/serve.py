"""`distspec serve`: an OpenAI-compatible server from one command, and nothing left behind when it ends."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from distspec.cli.options import Address, ConfigName, Overrides

if TYPE_CHECKING:
    from distspec.config import Config


def serve(
    config: ConfigName = "local",
    host: Annotated[
        str | None, typer.Option(help="Where to listen, as server.host. [127.0.0.1]", show_default=False)
    ] = None,
    port: Annotated[int | None, typer.Option(help="On which port, as server.port. [8000]", show_default=False)] = None,
    address: Address = None,
    overrides: Overrides = None,
) -> None:
    """Serve over HTTP, OpenAI-compatible, until interrupted.

    Another model: distspec serve model.name=FOLDER_OR_HUB_ID
    """
    from distspec.config import load
    from distspec.workers.logs import tell

    tell()
    flags = {"server.host": host, "server.port": port}
    given = [f"{key}={value}" for key, value in flags.items() if value is not None]
    settings = load(config, [*(overrides or ()), *given])
    began = time.perf_counter()
    _say(f"starting fleet {settings.name} ({settings.model.name}) and an HTTP server ...")

    from distspec.serving.cluster import cluster, whose
    from distspec.serving.ingress import serving
    from distspec.serving.listen import refuse_taken

    if whose(address) == "local":  # elsewhere Serve may run already, and hold the port itself
        refuse_taken(settings.server.host, settings.server.port)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with _until_interrupted(), cluster(address), serving(settings):
        _say(_ready(settings, time.perf_counter() - began))
        threading.Event().wait()


def _ready(config: Config, seconds: float) -> str:
    import ray

    url = f"http://{config.server.host}:{config.server.port}"
    return (
        f"\nready after {seconds:.0f} s: {url}/v1 serves {config.served_name}. Ctrl-C ends it.\n"
        f"Ray is at {ray.get_runtime_context().gcs_address}; `{sys.argv[0]} status` shows the fleet.\n\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d \\\n"
        f'    \'{{"stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}\'\n'
    )


@contextmanager
def _until_interrupted() -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the block, whatever it does. A second one ends what cleaning up waits for; later
    ones change nothing."""
    said = ["stopping at once ...", "stopping; a second Ctrl-C does not wait for answers under way ..."]

    def stop(*_: object) -> None:
        if said:
            _say(said.pop())
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    with suppress(KeyboardInterrupt):
        yield


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
