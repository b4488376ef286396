"""`distspec serve`: an OpenAI-compatible server from one command, and nothing left behind when it ends."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, Self

import typer

from distspec.cli.options import Address, ConfigName, Overrides

if TYPE_CHECKING:
    from distspec.config import Config


def serve(
    config: ConfigName = "local",
    host: Annotated[str | None, typer.Option(help="As server.host.", show_default=False)] = None,
    port: Annotated[int | None, typer.Option(help="As server.port.", show_default=False)] = None,
    address: Address = None,
    overrides: Overrides = None,
) -> None:
    """Serve over HTTP, OpenAI-compatible, until interrupted."""
    from distspec.config import load

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
    with _Interruption() as interruption, ExitStack() as stack:
        with interruption.held_back():
            stack.enter_context(cluster(address))
        stack.enter_context(serving(settings))
        _say(_ready(settings, time.perf_counter() - began))
        threading.Event().wait()


def _ready(config: Config, seconds: float) -> str:
    import ray

    url = f"http://{config.server.host}:{config.server.port}"
    return (
        f"\nready after {seconds:.0f} s: {url}/v1 serves {config.served_name}. Ctrl-C ends it.\n"
        f"Ray is at {ray.get_runtime_context().gcs_address}; `distspec status` shows the fleet.\n\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d \\\n"
        f'    \'{{"stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}\'\n'
    )


class _Interruption(AbstractContextManager["_Interruption"]):
    """The first SIGINT or SIGTERM ends the block, whatever it does; later ones do not disturb its cleaning up."""

    def __init__(self) -> None:
        self._came = self._is_held = False

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is KeyboardInterrupt

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """The first one waits until this ends; a second one does not. For Ray's start: torn off, it leaves processes
        for a minute, and this one crashes when it ends."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._came:
            raise KeyboardInterrupt

    def _stop(self, *_: object) -> None:
        is_first, self._came = not self._came, True
        if is_first:
            _say("stopping ...")
        if is_first != self._is_held:
            self._is_held = False
            raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
