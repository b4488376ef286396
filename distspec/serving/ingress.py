"""The Ray Serve application: one deployment with the OpenAI endpoints and a connection to the fleet.

Knows Ray Serve. Does not know requests; the endpoints are in `serving.http`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from distspec import heap
from distspec.config import Config, Server, check_served, load
from distspec.errors import FleetError, InvalidValue, UnknownKey
from distspec.serving.connect import check_models, connection, launch
from distspec.serving.http import create_app
from distspec.workers.logs import tell

ARGUMENTS = ("config", "overrides")
UNBOUNDED = 1_000_000
"""Requests that Serve lets through at once: the coordinator's admission is the one that refuses."""

DRAIN_LOOK_S = 0.5
"""A replica that is to end looks so often whether its answers have, for 20 s at most; it sleeps before it looks."""


class Ingress:
    """A replica. Several may serve one fleet; the first one that starts launches it."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]  # Serve awaits it
        tell()
        self._stack = AsyncExitStack()
        self._connection = await self._stack.enter_async_context(connection(config))
        self._connection.service.prepare()
        heap.settle()

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._connection.service, self._connection)

    async def __del__(self) -> None:
        await self._stack.aclose()


def configuration(args: Mapping[str, Any]) -> Config:
    """The configuration that a Serve application's args name; Serve itself takes any args silently.

    config: name or path (default: local). overrides: a list of `key=value`, or such in one string.
    Raises ConfigError.
    """
    for name in args:
        if name not in ARGUMENTS:
            raise UnknownKey(f"args.{name}", list(ARGUMENTS))
    overrides = args.get("overrides") or []
    if isinstance(overrides, str):
        overrides = overrides.split()
    if not isinstance(overrides, list) or not all(isinstance(item, str) for item in overrides):
        raise InvalidValue("args.overrides", overrides, "a list of strings `key=value`")
    return load(args.get("config", "local"), overrides)


def application(config: Config) -> serve.Application:
    """To be given to `serve.run`. Raises ConfigError for what must not be served."""
    check_served(config)
    deploys = serve.deployment(
        name="ingress",
        max_ongoing_requests=UNBOUNDED,
        max_queued_requests=-1,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
        ray_actor_options={"num_cpus": 0},
    )
    bound: serve.Application = deploys(serve.ingress()(Ingress)).bind(config)
    return bound


@contextmanager
def serving(config: Config) -> Iterator[None]:
    """The application on config.server's host and port, for as long as the context lasts. Ray must be initialised.

    The fleet is launched from here while the replica starts, so that what is wrong with it is raised as itself:
    ConfigError, ModelNotFound or FleetError.
    """
    check_served(config)
    check_models(config)
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    options = HTTPOptions(host=config.server.host, port=config.server.port)
    with _told_of_serve():
        serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=options, logging_config=quiet)
        _refuse_elsewhere(config.server)
        target = serve.RunTarget(application(config), name=config.name, route_prefix="/", logging_config=quiet)
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    try:
        # In this thread: one that is left behind by an interrupt would have Ray start anew, once it is gone.
        with closing(launch(config)):
            _wait_until_running(config.name)
            yield
    finally:
        with suppress(KeyboardInterrupt):  # it has been told; what is left is to wait for answers under way
            serve.delete(config.name)


@contextmanager
def _told_of_serve() -> Iterator[None]:
    """What Serve refuses within is a FleetError: that a port is taken, or the path of the application."""
    try:
        yield
    except (RayError, RayServeException, TimeoutError) as error:
        raise FleetError(f"Ray Serve: {getattr(error, 'cause', error)}") from None


def _refuse_elsewhere(wanted: Server) -> None:
    """Where Serve runs already, it listens where it does: it takes no other address. Raises InvalidValue."""
    client = _get_global_client()
    assert client is not None
    found = client.http_config
    for name in ("host", "port"):
        ours, theirs = getattr(wanted, name), getattr(found, name)
        if ours != theirs:
            raise InvalidValue(f"server.{name}", ours, f"{theirs}: Ray Serve runs on this cluster already, with that")


def _wait_until_running(name: str) -> None:
    """Raises FleetError with Serve's reason if the application does not come up."""
    while (application := serve.status().applications.get(name)) is None or application.status != "RUNNING":
        if application is not None and application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise FleetError(f"Ray Serve could not start {name}: {application.message}")
        time.sleep(0.1)
